"""The `stts-hf` command: `main` dispatches, and each sub-command has its file."""
