"""`torch.compile` for the parts of the model that it suits: vision tower and language model."""

import inspect

import torch


class CompilingMixin:
    """Mixin that goes before `PreTrainedModel`."""

    def compile_parts(
        self, vision: bool = True, decoder: bool = True, regional: bool = True, **torch_compile_kwargs
    ) -> None:
        """
        Compiles vision tower and language model in place, free of graph breaks; weights and their names stay as they
        are. Sizes are known on the host, so a call compiles once per (frames, ratio), whatever the videos show, and a
        training of one shape (`pruned_length`) once in all.

        regional: compile one layer and use it for all, which takes a fraction of the time (docs/behaviour.md). Without,
        each part becomes one graph: for a prefill into a cache, where layers differ by their place in it (not with
        the "random" selector, whose seeded generator no graph can hold).
        torch_compile_kwargs: those of `torch.compile`. Raises `ValueError` where nothing is to be compiled, and for a
        whole tower with bins, whose number depends on the video.
        """
        if not vision and not decoder:
            raise ValueError("`vision` and `decoder` are both False, but `compile_parts` needs a part to compile.")
        if vision and not regional and self.config.vision_config.packing != "varlen":  # type: ignore[attr-defined]
            raise ValueError(
                "`regional` is False, but `packing` is 'first_fit_descending', whose number of bins depends on the "
                "video, so the vision tower cannot be one graph. Use regional=True, vision=False or packing='varlen'."
            )
        torch_compile_kwargs = {"fullgraph": True} | torch_compile_kwargs
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            # The layers of both parts count as one function, and each has several kinds of calls.
            torch_compile_kwargs.setdefault("recompile_limit", 64)
        model = self.model  # type: ignore[attr-defined]
        for part in [model.vision_tower] * vision + [model.language_model] * decoder:
            for module in part.layers if regional else [part]:
                module.compile(**torch_compile_kwargs)
