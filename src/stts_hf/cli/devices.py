"""Which device a command runs on."""

from typing import Any

from stts_hf.cli.errors import CommandError, one_line


def choose_device(name: str) -> Any:
    """Returns the `torch.device`, the fastest there is for "auto". Raises `CommandError` for one that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {name} cannot be used here: {one_line(error, 120)}") from None
    if device.type == "meta":
        raise CommandError("--device meta cannot be used here: it has shapes, but no numbers")
    return device
