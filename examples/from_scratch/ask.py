"""Ask an exported model held-out questions, with transformers and with vLLM: ``python ask.py FOLDER QUESTIONS [COUNT]``.

Nothing here is of Engine: this is how anyone uses the folder that ``engine export`` wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def with_vllm(folder: str, questions: list[str]) -> list[str]:
    """Return vLLM's greedy answers."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, gpu_memory_utilization=0.3, max_model_len=512)
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [
        answer.outputs[0].text
        for answer in llm.chat(chats, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)
    ]


def with_transformers(folder: str, questions: list[str]) -> list[str]:
    """Return the greedy answers of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    tokens = model.generate(**inputs.to(device), do_sample=False, max_new_tokens=160)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(folder: str, file: str, count: str = "200") -> None:
    """Print two answers, the share of right ones of each library, and how many answers are equal."""
    rows = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()[: int(count)]]
    questions = [row["prompt"] for row in rows]
    answers = {"vllm": with_vllm(folder, questions), "transformers": with_transformers(folder, questions)}
    for question, answer in list(zip(questions, answers["vllm"], strict=True))[:2]:
        print(f"\n{question}\n  {answer}")
    print()
    for name, texts in answers.items():
        right = [
            re.findall(r"\d+", text)[-1:] == [row["answer"]] for text, row in zip(texts, rows, strict=True)
        ]
        print(f"{name}: {sum(right)} of {len(rows)} right")
    equal = sum(a.strip() == b.strip() for a, b in zip(*answers.values(), strict=True))
    print(f"equal answers: {equal} of {len(rows)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
