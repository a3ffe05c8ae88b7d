"""LoRA with PEFT and plain `Trainer`: finetune_lora.py CHECKPOINT ROWS.jsonl OUTPUT [STEPS]"""

import sys

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from stts_hf import STTSDataCollator, load_rows
from stts_hf.checkpoints.card import write_model_card
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.training.config import TEXT_LINEAR

checkpoint, data, output = sys.argv[1:4]
family = family_of_checkpoint(checkpoint)  # its classes, for STTS or a stock model of a backbone
processor = family.processor.from_pretrained(checkpoint, trust_remote_code=False)
model = get_peft_model(
    family.model.from_pretrained(checkpoint),
    LoraConfig(
        r=16,
        lora_alpha=32,
        use_dora=False,  # True for DoRA
        target_modules=TEXT_LINEAR,  # "q_proj" by itself would hit the vision tower and the connector too
        modules_to_save=["scorer"],  # trained in full, saved with the adapter
    ),
)
model.print_trainable_parameters()

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=output,
        max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 1000,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to="tensorboard",
        remove_unused_columns=False,  # the collator reads the rows' own columns
    ),
    train_dataset=load_rows(data),
    data_collator=STTSDataCollator(processor, model_config=model.config),
)
trainer.train()
model.save_pretrained(output)  # LoRA weights and scorer
write_model_card(output)

base = family.model.from_pretrained(checkpoint)  # later, or on another machine
reloaded = PeftModel.from_pretrained(base, output).eval()
reloaded.merge_and_unload().save_pretrained(f"{output}/merged")  # a checkpoint of its own, without PEFT
processor.save_pretrained(f"{output}/merged")
