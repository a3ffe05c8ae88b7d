"""LoRA with TRL: finetune_trl.py CHECKPOINT ROWS.jsonl OUTPUT [STEPS]. Needs `pip install trl`."""

import sys

from peft import LoraConfig

from stts_hf import STTSDataCollator, load_rows
from stts_hf.checkpoints.card import write_model_card
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.training.config import TEXT_LINEAR
from stts_hf.training.sft import STTSSFTConfig, STTSSFTTrainer  # a trl.SFTTrainer and SFTConfig with STTS's losses

checkpoint, data, output = sys.argv[1:4]
family = family_of_checkpoint(checkpoint)  # its classes, for STTS or a stock model of a backbone
model = family.model.from_pretrained(checkpoint)
processor = family.processor.from_pretrained(checkpoint, trust_remote_code=False)

trainer = STTSSFTTrainer(
    model,
    STTSSFTConfig(
        output_dir=output,
        max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 1000,
        per_device_train_batch_size=2,
        learning_rates={"adapter": 1e-4, "scorer": 1e-4},
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to="tensorboard",
    ),
    train_dataset=load_rows(data),
    data_collator=STTSDataCollator(processor, model_config=model.config, return_ids=True),
    processing_class=processor,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=TEXT_LINEAR, modules_to_save=["scorer"]),
)
trainer.train()
trainer.save_model()  # LoRA weights, scorer, processor
write_model_card(output)
