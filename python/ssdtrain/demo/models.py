"""Which model the demo trains."""

from __future__ import annotations

import torch

from ssdtrain.demo.gpt import ByteGPTTrainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.trainee import Trainee


def build_trainee(options: TrainingOptions) -> Trainee:
    """Build the model that the options name, in training mode, with weights from their seed."""
    torch.manual_seed(options.seed)
    trainee: Trainee
    if options.model == "gpt":
        trainee = ByteGPTTrainee(options)
    else:
        # Imported here: transformers is an extra, and takes seconds to import.
        from ssdtrain.demo.hugging_face import HuggingFaceTrainee  # noqa: PLC0415

        trainee = HuggingFaceTrainee(options)
    trainee.module.train()
    return trainee
