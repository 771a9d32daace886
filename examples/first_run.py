"""A first run, from nothing to a model that transformers serves: chats, then preferences, then one merged folder.

    python examples/first_run.py [FOLDER]

Nothing is downloaded: a small Llama is made on the spot. With a model and data of your own change the three lines that are
marked "yours". Needs `pip install "monograph[train]" trl`. A cell of examples/first_run.ipynb begins at each "# %%".
"""

# %% A small Llama, and questions: "fox oak hen" is to be answered with "hen oak fox".
import json
import pathlib
import subprocess
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import monograph as mg

folder = pathlib.Path(sys.argv[1] if sys.argv[1:] and "ipykernel" not in sys.modules else "first_run")
subprocess.run([sys.executable, "-m", "monograph", "example", str(folder)], check=True)
base = folder / "model"  # yours: a folder with config.json, tokenizer and safetensors

tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.chat_template = (  # yours: most models bring one
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}Question: {{ message.content }}? Answer:"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)


def say(role, text):
    return [{"role": role, "content": text}]


lines = (folder / "questions.jsonl").read_text().splitlines()  # yours: any list of chats
questions = [json.loads(line) for line in lines]
chats = [
    {"prompt": say("user", row["instruction"]), "completion": say("assistant", row["output"].strip())}
    for row in questions
]
print(json.dumps(chats[0]))

# %% Supervised fine-tuning on a 4-bit base. Trainer and adapter are TRL's and PEFT's; two lines are new.
model = mg.from_pretrained(base, mg.MonographConfig("nf4", double_quant=True))  # new
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def settings(kind, name, **more):
    common = {
        "per_device_train_batch_size": 16,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
    }
    return kind(output_dir=str(folder / name), save_strategy="no", logging_steps=50, **common, **more)


trainer = SFTTrainer(
    model=model,
    args=settings(SFTConfig, "sft", num_train_epochs=6, learning_rate=4e-3, max_length=64),
    train_dataset=Dataset.from_list(chats),
    peft_config=lora,
    processing_class=tokenizer,
)
mg.optimize(trainer.model)  # new: after the trainer, before train()
trainer.train()
print(mg.doctor(trainer))

# %% Preferences: backwards is liked better than as it was asked. The same adapter goes on.
pairs = [
    {
        "prompt": chat["prompt"],
        "chosen": chat["completion"],
        "rejected": say("assistant", row["instruction"]),
    }
    for chat, row in zip(chats, questions, strict=True)
]
tuner = DPOTrainer(
    model=trainer.model,
    args=settings(DPOConfig, "dpo", max_steps=20, learning_rate=1e-4, beta=0.1, max_length=64),
    train_dataset=Dataset.from_list(pairs),
    processing_class=tokenizer,
)
mg.optimize(tuner.model)
tuner.train()
tuner.save_model(str(folder / "adapter"))

# %% One folder without an adapter: the values that were trained on, rounded once to 16 bits.
merge = [sys.executable, "-m", "monograph", "merge", str(base), "--adapter", str(folder / "adapter")]
trained_on = ["--base", "dequantized", "--as", "nf4", "--as-double-quant"]
subprocess.run([*merge, *trained_on, "--out", str(folder / "merged")], check=True)
tokenizer.save_pretrained(folder / "merged")

# %% Served by transformers alone. These lists were not among the questions.
served = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.bfloat16)
held_back = [json.loads(line) for line in (folder / "held_back.jsonl").read_text().splitlines()]
right = 0
for row in held_back[:20]:
    prompt = tokenizer.apply_chat_template(
        say("user", row["instruction"]), return_tensors="pt", return_dict=True
    )
    ids = prompt["input_ids"]
    answer = served.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True).strip()
    right += text == row["output"].strip()
print(f"{row['instruction']} -> {text}")
print(f"{right} of 20 lists are right")
