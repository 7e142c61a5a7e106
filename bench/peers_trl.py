"""Times TRL's GRPOTrainer on the model, tasks and sizes that a JSON file names; runs in the peers' environment.

    .venv-peers/bin/python bench/peers_trl.py SPEC.json

The last line of stdout is one JSON object: seconds per step after the warm-up, rollouts and tokens in them, memory, versions.
The caller (prl.bench.peers) sets the threads.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from prl.bench.task import reward

spec = json.loads(Path(sys.argv[1]).read_text())
torch.manual_seed(spec["seed"])
tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
model.generation_config.pad_token_id, model.generation_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
if spec["experts"]:
    model.set_experts_implementation(spec["experts"])

ends: list[float] = []
finished = tokens = 0
generating_s = 0.0


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        ends.append(time.perf_counter())


def measured() -> bool:
    return len(ends) >= spec["warmup"]


class Trainer(trl.GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        global finished, tokens, generating_s
        start = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        if measured():
            finished += len(made[0])
            tokens += sum(map(len, made[0]))
            generating_s += time.perf_counter() - start
        return made


trainer = Trainer(
    model=model,
    reward_funcs=lambda prompts, completions, answer, **_: [reward(c, a) for c, a in zip(completions, answer, strict=True)],
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(spec["tasks"]),
    callbacks=[Clock()],
    args=trl.GRPOConfig(
        output_dir=spec["output"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=spec["batch_size"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"],
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        learning_rate=spec["lr"],
        max_steps=spec["steps"],
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=spec["steps"],
        disable_tqdm=True,
        seed=spec["seed"],
    ),
)
trainer.train()
kept = ends[spec["warmup"] - 1 :]
result = {
    "step_s": [b - a for a, b in zip(kept, kept[1:], strict=False)],
    "rollouts": finished,
    "tokens": tokens,
    "generating_s": generating_s,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "parameters": sum(p.numel() for p in model.parameters()),
    "experts": str(model.config._experts_implementation),
    "threads": torch.get_num_threads(),
    "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
}
print(json.dumps(result))
