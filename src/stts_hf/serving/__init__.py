"""STTS behind an OpenAI-compatible server: a plugin for vLLM (docs/serving.md)."""
