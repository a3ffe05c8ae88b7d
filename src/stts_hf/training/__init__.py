"""Fine-tuning: data, trainer and what they need."""
