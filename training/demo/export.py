"""From a training state to the bundled checkpoint: `python -m training.demo.export` (bf16 folder, then NVFP4)."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from training.demo.config import DemoConfig
from training.demo.model import build_config, build_model
from training.demo.template import BUNDLE
from training.demo.tokenizer import load_tokenizer, token_id
from training.demo.train import DEFAULT_FOLDER

KEPT_FLOAT32 = (".A_log", ".dt_bias")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_record(config: Qwen3_5TextConfig) -> dict[str, object]:
    """config.json: what transformers writes, less what it writes about itself."""
    record: dict[str, object] = config.to_dict()
    for key in ("transformers_version", "_name_or_path", "bos_token_id"):
        record.pop(key, None)
    return {**record, "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}


def export_half(state: dict[str, torch.Tensor], folder: Path) -> None:
    """A bf16 checkpoint in Hugging Face layout; the embedding is tied, so there is no lm_head."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer()
    end, stop = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    tensors = {
        name: (tensor.float() if name.endswith(KEPT_FLOAT32) else tensor.to(torch.bfloat16)).contiguous()
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config_record(build_config(DemoConfig().shape, [end, stop], stop)))
    _write_json(folder / "generation_config.json", {**GENERATION, "eos_token_id": [end, stop], "pad_token_id": stop})
    for name in TEXT_FILES:
        if folder != BUNDLE:
            shutil.copyfile(BUNDLE / name, folder / name)


def export_bundle(half: Path) -> None:
    """Quantise the bf16 folder into the bundle, keeping the bundle's own card and text files."""
    from engine.weights.quantize import quantize_checkpoint

    with tempfile.TemporaryDirectory(dir=half.parent) as scratch:
        made = Path(scratch) / "nvfp4"
        quantize_checkpoint(half, made)
        for file in made.iterdir():
            if file.name not in TEXT_FILES:
                shutil.copyfile(file, BUNDLE / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the training state is")
    parser.add_argument("--untrained", action="store_true", help="random weights, to try the layout")
    parser.add_argument("--half-only", action="store_true", help="write the bf16 folder and leave the bundle alone")
    options = parser.parse_args()
    if options.untrained:
        config = DemoConfig()
        state = build_model(build_config(config.shape, [2, 0], 0), config.plan.seed).state_dict()
    else:
        state = torch.load(options.folder / "state.pt", weights_only=True)["model"]
    half = options.folder / "bf16"
    export_half(state, half)
    if not options.half_only:
        export_bundle(half)


if __name__ == "__main__":
    main()
