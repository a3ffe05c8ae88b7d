"""Plain `transformers.Trainer`: finetune.py CHECKPOINT ROWS.jsonl OUTPUT [STEPS]"""

import sys

import torch
from transformers import Trainer, TrainingArguments

from stts_hf import STTSDataCollator, load_rows
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.model_parts import parts_of

RATES = {"language_model": 1e-5, "vision_tower": 5e-6, "connector": 5e-6, "scorer": 1e-4}  # the paper's

checkpoint, data, output = sys.argv[1:4]
family = family_of_checkpoint(checkpoint)  # its classes, for STTS or a stock model of a backbone
model = family.model.from_pretrained(checkpoint)
processor = family.processor.from_pretrained(checkpoint, trust_remote_code=False)
groups: dict[str, list] = {part: [] for part in RATES}
parts = parts_of(model)
for name, parameter in model.named_parameters():
    groups[parts[name]].append(parameter)
optimizer = torch.optim.AdamW([{"params": groups[part], "lr": rate} for part, rate in RATES.items()], weight_decay=0.0)

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=output,
        max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 1000,
        per_device_train_batch_size=2,
        lr_scheduler_type="cosine",
        warmup_steps=200,
        logging_steps=1,
        report_to="tensorboard",
        remove_unused_columns=False,  # the collator reads the rows' own columns
    ),
    train_dataset=load_rows(data),
    data_collator=STTSDataCollator(processor, model_config=model.config),
    processing_class=processor,
    optimizers=(optimizer, None),
)
trainer.train()  # the loss is task_loss + temporal_loss_weight * temporal_loss
trainer.save_model()  # a complete folder: weights, code, processor
