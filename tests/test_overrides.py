"""Every method of transformers that is not public and that we override, and what we rely on in it.

transformers may change such a method in any release, without a word. `RELIED_ON` is the whole list: a test looks for
overrides that are missing from it. When a new release fails here, read the native method again, mend the override, and
then change its line.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import transformers

import stts_hf


@dataclass(frozen=True)
class Native:
    """
    parameters: names of the native method's parameters, in order. called_by: the native function that calls it and the
    call that it makes. why: what the override does, and what it counts on.
    """

    parameters: str
    called_by: str
    call: str
    why: str


TRAINER = "transformers.trainer.Trainer"
RELIED_ON = {
    f"{TRAINER}._push_from_checkpoint": Native(
        "self, checkpoint_folder",
        f"{TRAINER}._save_checkpoint",
        r"self\._push_from_checkpoint\(output_dir\)",
        "a checkpoint is pushed after it has moved to its place, with its card",
    ),
    f"{TRAINER}._save": Native(
        "self, output_dir, state_dict",
        f"{TRAINER}.save_model",
        r"self\._save\(output_dir, state_dict=state_dict\)",
        "a model moves to its place when it is whole, and every folder with weights gets a model card",
    ),
    "transformers.models.molmo2.modeling_molmo2.Molmo2PreTrainedModel._init_weights": Native(
        "self, module",
        "transformers.modeling_utils.PreTrainedModel._initialize_weights",
        r"self\._init_weights\(module\)",
        "a new scorer's last layer is zero, so that it prunes nothing in particular before it is trained",
    ),
    "transformers.modeling_utils.PreTrainedModel._init_weights": Native(
        "self, module",
        "transformers.modeling_utils.PreTrainedModel._initialize_weights",
        r"self\._init_weights\(module\)",
        "the same, for backbones that have no method of their own",
    ),
    "transformers.models.molmo2.video_processing_molmo2.Molmo2VideoProcessor._preprocess": Native(
        "self, videos, size, resample, do_rescale, rescale_factor, do_normalize, image_mean, image_std, patch_size, "
        "pooling_size, return_tensors, kwargs",
        "transformers.video_processing_utils.VideoProcessorMixin.preprocess",
        r"self\._preprocess\(videos=videos, \*\*kwargs\)",
        "frames are preprocessed a few at a time: each call makes patches, pooling indices and a grid of its frames",
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


def native(path: str) -> Callable:
    module, owner, name = path.rsplit(".", 2)
    return inspect.unwrap(getattr(getattr(importlib.import_module(module), owner), name))


def test_every_override_is_listed():
    unlisted = {path: ours for path, ours in overridden().items() if path not in RELIED_ON}
    assert not unlisted, f"add to RELIED_ON what these overrides rely on, or override something public: {unlisted}"


def test_nothing_else_is_listed():
    unused = RELIED_ON.keys() - overridden().keys()
    assert not unused, f"no class of ours overrides these any more, so remove them from RELIED_ON: {unused}"


@pytest.mark.parametrize("path", RELIED_ON)
def test_its_parameters_are_those_we_know(path):
    known = RELIED_ON[path]
    found = ", ".join(inspect.signature(native(path)).parameters)
    assert found == known.parameters, (
        f"transformers {transformers.__version__} gives `{path}` the parameters ({found}), where we know "
        f"({known.parameters}). We override it because {known.why}."
    )


@pytest.mark.parametrize("path", RELIED_ON)
def test_it_is_called_as_we_know(path):
    known = RELIED_ON[path]
    try:
        source = inspect.getsource(native(known.called_by))
    except AttributeError:
        source = ""
    assert re.search(known.call, source), (
        f"in transformers {transformers.__version__} `{known.called_by}` no longer calls `{path}` the way we know. "
        f"We override it because {known.why}: find out who calls it now."
    )
