"""Train a small Llama with the Trainer of Hugging Face, FSDP2 and Muon: the model is cut after the build."""

import torch
from megaopt_fsdp import build_before_sharding
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

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
    max_grad_norm=0.0,
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
    fsdp=True,
    fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
)
settings = {
    "optimizer": "muon",
    "lr": arguments.learning_rate,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "muon_extra_scale_factor": 0.2,
}


class Report(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.is_world_process_zero:
            print(getattr(optimizer, "optimizer", optimizer).report())


trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    callbacks=[Report()],
    optimizer_cls_and_kwargs=(lambda: build_before_sharding, settings),
)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"step {result.global_step}: mean loss {result.training_loss:.2f}")
trainer.accelerator.wait_for_everyone()
