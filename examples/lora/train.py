"""Train LoRA adapters of a small Llama with the Trainer of Hugging Face and Muon."""

import argparse

import torch
from megaopt_trainers.peft import lora_overrides
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from megaopt_core import build_optimizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--optimizer", default="muon", choices=["adam", "muon"])
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
model = get_peft_model(
    model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "embed_tokens"])
)
rows = [{"input_ids": torch.arange(start, start + 32) % 128} for start in range(256)]
data = [{**row, "labels": row["input_ids"]} for row in rows]

lr = 2e-2
settings = {"optimizer": "adam", "overrides": lora_overrides(model, lr=lr, ratio=16, embedding_lr=lr)}
if options.optimizer == "muon":
    overrides = lora_overrides(model, lr=lr, embedding_lr=lr)
    settings = {"optimizer": "muon", "overrides": overrides, "muon_scale_mode": "shape_scaling"}
arguments = TrainingArguments(
    output_dir="adapters",
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=lr,
    max_grad_norm=0.0,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    optimizer_cls_and_kwargs=(
        lambda: build_optimizer,
        {"lr": lr, "weight_decay": 0.0, "clip_grad": 1.0, **settings},
    ),
)
trainer.create_optimizer()
print(trainer.optimizer.report())
result = trainer.train()
print(f"step {result.global_step}: mean loss {result.training_loss:.2f}")
