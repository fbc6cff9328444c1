"""What is known of G10's traces under the strict replay: check values and bounds.

The traces are those of *G10: Enabling An Efficient Unified GPU Memory and Storage Architecture with
Smart Tensor Migrations* (MICRO '23, arXiv 2310.09443). `no_plan_can_beat` is the lesser of
bandwidth arithmetic and a linear relaxation of the replay's rules.
"""

from __future__ import annotations

from typing import NamedTuple

HOST = "host+ssd"
SSD = "ssd"


class Known(NamedTuple):
    """Two scores of one trace and class."""

    empty: float
    """Of the plan without moves."""
    no_plan_can_beat: float


KNOWN: dict[tuple[str, int], dict[str, Known]] = {
    ("BERT_Base", 128): {HOST: Known(1.000000, 1.0000), SSD: Known(1.000000, 1.0000)},
    ("BERT_Base", 256): {HOST: Known(0.845905, 1.0000), SSD: Known(0.523269, 0.7950)},
    ("BERT_Base", 512): {HOST: Known(0.524231, 0.8007), SSD: Known(0.180540, 0.2622)},
    ("BERT_Base", 768): {HOST: Known(0.449243, 0.7360), SSD: Known(0.140225, 0.2025)},
    ("BERT_Base", 1024): {HOST: Known(0.316827, 0.6957), SSD: Known(0.122499, 0.1710)},
    ("VIT", 256): {HOST: Known(1.000000, 1.0000), SSD: Known(1.000000, 1.0000)},
    ("VIT", 512): {HOST: Known(1.000000, 1.0000), SSD: Known(1.000000, 1.0000)},
    ("VIT", 768): {HOST: Known(1.000000, 1.0000), SSD: Known(1.000000, 1.0000)},
    ("VIT", 1024): {HOST: Known(0.770447, 1.0000), SSD: Known(0.401587, 0.6788)},
    ("VIT", 1280): {HOST: Known(0.563913, 0.8525), SSD: Known(0.205440, 0.3160)},
    ("Inceptionv3", 512): {HOST: Known(0.985184, 1.0000), SSD: Known(0.930049, 1.0000)},
    ("Inceptionv3", 768): {HOST: Known(0.938153, 1.0000), SSD: Known(0.752048, 1.0000)},
    ("Inceptionv3", 1024): {HOST: Known(0.897779, 1.0000), SSD: Known(0.637169, 0.9182)},
    ("Inceptionv3", 1280): {HOST: Known(0.858202, 1.0000), SSD: Known(0.547542, 0.7809)},
    ("Inceptionv3", 1536): {HOST: Known(0.823268, 1.0000), SSD: Known(0.482246, 0.6733)},
    ("Inceptionv3", 1792): {HOST: Known(0.789390, 0.9934), SSD: Known(0.428386, 0.5921)},
    ("ResNet152", 256): {HOST: Known(0.980856, 1.0000), SSD: Known(0.911067, 1.0000)},
    ("ResNet152", 512): {HOST: Known(0.919091, 1.0000), SSD: Known(0.694313, 1.0000)},
    ("ResNet152", 768): {HOST: Known(0.866182, 1.0000), SSD: Known(0.564126, 0.9369)},
    ("ResNet152", 1024): {HOST: Known(0.679018, 1.0000), SSD: Known(0.475882, 0.7786)},
    ("ResNet152", 1280): {HOST: Known(0.556541, 1.0000), SSD: Known(0.413687, 0.6625)},
    ("SENet154", 256): {HOST: Known(0.952003, 1.0000), SSD: Known(0.798628, 1.0000)},
    ("SENet154", 512): {HOST: Known(0.863203, 1.0000), SSD: Known(0.590713, 0.9774)},
    ("SENet154", 768): {HOST: Known(0.626630, 1.0000), SSD: Known(0.471167, 0.8047)},
    ("SENet154", 1024): {HOST: Known(0.490115, 0.9958), SSD: Known(0.389440, 0.6229)},
}

MAIN = (
    ("BERT_Base", 256),
    ("VIT", 1280),
    ("Inceptionv3", 1536),
    ("ResNet152", 1280),
    ("SENet154", 1024),
)
"""The points of the paper's main figure."""

POLICIES = {"prefetch_lru": HOST, "G10GDSFULL": HOST, "G10GDSSSD": SSD}
"""G10's own policies, and the class in which their plans are replayed."""

OWN: dict[str, tuple[float, ...]] = {
    "prefetch_lru": (1.0, 0.741434, 0.975195, 0.992200, 0.919288),
    "G10GDSFULL": (0.807598, 0.499982, 0.864601, 0.931117, 0.855231),
    "G10GDSSSD": (0.636831, 0.237746, 0.460783, 0.412114, 0.376859),
}
"""Scores of G10's own plans on the main points."""

OWN_NOISY = (1.0, 0.744350, 0.974116, 0.992362, 0.906425)
"""Scores of `prefetch_lru` with the noise of seed 1."""
