"""Every method of transformers that is not public and that we override, and what we rely on in it.

transformers may change such a method in any release, without a word. `RELIED_ON` is the whole list: a test looks for
overrides that are missing from it. When a new release fails here, read the native method again, mend the override, and
then change its line.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest
import transformers

import stts_hf

# Native method -> the names of its parameters, and what the override does and counts on.
RELIED_ON = {
    "transformers.trainer.Trainer._push_from_checkpoint": (
        "self, checkpoint_folder",
        "a checkpoint is pushed after it has moved to its place, with its card",
    ),
    "transformers.trainer.Trainer._save": (
        "self, output_dir, state_dict",
        "a model moves to its place when it is whole, and every folder with weights gets a model card",
    ),
    "transformers.models.molmo2.modeling_molmo2.Molmo2PreTrainedModel._init_weights": (
        "self, module",
        "a new scorer's last layer is zero, so that it prunes nothing in particular before it is trained",
    ),
    "transformers.modeling_utils.PreTrainedModel._init_weights": (
        "self, module",
        "the same, for backbones that have no method of their own",
    ),
    "transformers.models.molmo2.video_processing_molmo2.Molmo2VideoProcessor._preprocess": (
        "self, videos, size, resample, do_rescale, rescale_factor, do_normalize, image_mean, image_std, patch_size, "
        "pooling_size, return_tensors, kwargs",
        "frames are preprocessed a few at a time: each call makes patches, pooling indices and a grid of its frames",
    ),
    "transformers.models.smolvlm.video_processing_smolvlm.SmolVLMVideoProcessor._preprocess": (
        "self, videos, do_resize, size, resample, do_rescale, rescale_factor, do_normalize, do_pad, image_mean, "
        "image_std, return_tensors, kwargs",
        "videos are preprocessed one at a time, without padding: `pixel_values` of a call has the frames of one",
    ),
}


def our_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(stts_hf.__path__, "stts_hf."):
        if module.name.startswith(("stts_hf.evaluation.lmms_", "stts_hf.serving.")):  # extras that exclude the others
            continue
        if not module.name.endswith("__main__"):
            for value in list(vars(importlib.import_module(module.name)).values()):
                if inspect.isclass(value) and value.__module__.startswith("stts_hf."):
                    yield value


def overridden() -> dict[str, str]:
    """Native method -> our class that overrides it, mixins included: whatever comes before it where both are bases."""
    found = {}
    for ours in our_classes():
        for place, owner in enumerate(ours.__mro__):
            if owner.__module__.startswith("stts_hf."):
                for name, value in vars(owner).items():
                    if re.match("_[^_]", name) and (callable(value) or isinstance(value, classmethod | property)):
                        above = (base for base in ours.__mro__[place + 1 :] if name in vars(base))
                        native = next((base for base in above if base.__module__.startswith("transformers.")), None)
                        if native is not None:
                            found[f"{native.__module__}.{native.__qualname__}.{name}"] = owner.__qualname__
    return found


def test_every_override_is_listed_and_nothing_else():
    unlisted = {path: ours for path, ours in overridden().items() if path not in RELIED_ON}
    assert not unlisted, f"add to RELIED_ON what these overrides rely on, or override something public: {unlisted}"
    unused = RELIED_ON.keys() - overridden().keys()
    assert not unused, f"no class of ours overrides these any more, so remove them from RELIED_ON: {unused}"


@pytest.mark.parametrize("path", RELIED_ON)
def test_its_parameters_are_those_we_know(path):
    known, why = RELIED_ON[path]
    module, owner, name = path.rsplit(".", 2)
    method = inspect.unwrap(getattr(getattr(importlib.import_module(module), owner), name))
    found = ", ".join(inspect.signature(method).parameters)
    assert found == known, (
        f"transformers {transformers.__version__} gives `{path}` the parameters ({found}), where we know ({known}). We "
        f"override it because {why}."
    )
