"""The callback with a trainer of TRL, where that is installed: it brings 270 MB of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import ssdtrain
from support import assert_equal_bits, nothing_leaks, write_after_forward

trl = pytest.importorskip("trl")


# TRL 1.16 sets what transformers 5.20 named anew.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_not_one_bit_differs(tmp_path: Path) -> None:
    from datasets import Dataset  # noqa: PLC0415 - it is there where TRL is
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    from ssdtrain.integrations.transformers import OffloadCallback  # noqa: PLC0415

    words = {f"w{number}": number for number in range(64)}
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        eos_token="w0",
        pad_token="w1",
    )
    rows = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
    data = Dataset.from_list([{"input_ids": row} for row in rows.tolist()])

    def train(*callbacks: OffloadCallback) -> dict[str, Tensor]:
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        write_after_forward(model)
        trainer = trl.SFTTrainer(
            model,
            trl.SFTConfig(
                output_dir=str(tmp_path / "out"),
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                max_steps=4,
                max_length=16,
                logging_steps=1,
                save_strategy="no",
            ),
            train_dataset=data,
            processing_class=tokens,
            callbacks=list(callbacks),
        )
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        logged = ["ssdtrain/bytes_written" in one for one in trainer.state.log_history[:4]]
        assert logged == [bool(callbacks)] * 4
        return {"losses": torch.tensor(losses), **trainer.model.state_dict()}

    callback = OffloadCallback(tmp_path, min_bytes=1)
    with nothing_leaks():
        assert_equal_bits(train(callback), train())
        assert ssdtrain.active() is None
    assert callback.session is not None
    assert callback.session.stats.bytes_written > 0
