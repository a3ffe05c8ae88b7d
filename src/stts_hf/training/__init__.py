"""Fine-tuning: the trainer, its losses and metrics, and `stts-hf train`."""
