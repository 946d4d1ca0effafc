"""Train a small Llama with the Trainer of Hugging Face and its AdamW."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
rows = [{"input_ids": torch.arange(start, start + 32) % 128} for start in range(256)]
data = [{**row, "labels": row["input_ids"]} for row in rows]

arguments = TrainingArguments(
    output_dir="trainer",
    max_steps=20,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.1,
    max_grad_norm=1.0,
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data)
result = trainer.train()
print(f"step {result.global_step}: mean loss {result.training_loss:.2f}")
