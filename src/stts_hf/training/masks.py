"""Keep masks of rows and the answer losses under them, and the files that hold them."""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stts_hf.data.lines import open_lines, read_lines, write_line

FILES = "_masks_{}.jsonl"  # one for each process; `Trainer` pushes nothing that begins with an underscore


@dataclass
class Masks:
    """
    Keep masks of one row and the answer loss under each. dropped: (groups, M, G) bool, of the `G` blocks of its videos;
    the masks of a group drop one share. losses: (groups, M) float32, in nats.
    """

    dropped: torch.Tensor
    losses: torch.Tensor

    @classmethod
    def none(cls) -> "Masks":
        """Of a row without videos."""
        return cls(torch.zeros(1, 1, 0, dtype=torch.bool), torch.zeros(1, 1))

    def to_json(self) -> dict[str, Any]:
        packed = b64encode(np.packbits(self.dropped.numpy()).tobytes()).decode()
        return {"shape": list(self.dropped.shape), "dropped": packed, "losses": self.losses.tolist()}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Masks":
        """What `to_json` wrote; raises `ValueError` or `KeyError` for anything else."""
        shape = tuple(entry["shape"])
        bits = np.unpackbits(np.frombuffer(b64decode(entry["dropped"]), np.uint8), count=int(np.prod(shape)))
        return cls(torch.from_numpy(bits.reshape(shape).astype(bool)), torch.tensor(entry["losses"]))


class MaskStore:
    """
    Masks by the key of a row, kept as lines of a file, so that a resumed run does not measure them again.

    identity: of the frozen weights and the settings; lines of another one are ignored. unit: `worth_unit` of the run,
    None until it is set. Raises `ValueError` for a file that something else wrote to.
    """

    def __init__(self, folder: Path, identity: str, process: int = 0) -> None:
        self.folder, self.identity = folder, identity
        self.unit: float | None = None
        self.masks: dict[str, list[Masks]] = {}  # by round
        folder.mkdir(parents=True, exist_ok=True)
        self._read(folder.glob(FILES.format("*")))
        self.path = folder / FILES.format(process)
        self.file = open_lines(self.path)

    def reload(self) -> None:
        """Reads the files of other processes again, which may have grown."""
        self._read(path for path in self.folder.glob(FILES.format("*")) if path != self.path)

    def _read(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            try:
                for entry in read_lines(path)[0]:
                    if entry["identity"] == self.identity and "unit" in entry:
                        self.unit = float(entry["unit"])
                    elif entry["identity"] == self.identity:
                        self._keep(entry["key"], entry["round"], Masks.from_json(entry))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is damaged ({error}). Delete it: its masks are measured again.") from error

    def _keep(self, key: str, number: int, masks: Masks) -> None:
        rounds = self.masks.setdefault(key, [])
        if len(rounds) == number:
            rounds.append(masks)

    def lacks(self, key: str, number: int) -> bool:
        """Whether a row has no masks of round `number`."""
        return len(self.masks.get(key, ())) <= number

    def add(self, key: str, masks: Masks) -> None:
        """Keeps and writes the masks of a row's next round."""
        number = len(self.masks.get(key, ()))
        write_line(self.file, {"identity": self.identity, "key": key, "round": number} | masks.to_json())
        self._keep(key, number, masks)

    def set_unit(self, unit: float) -> None:
        """Sets the run's unit, and writes it."""
        self.unit = unit
        write_line(self.file, {"identity": self.identity, "unit": unit})

    def get(self, key: str, number: int) -> Masks:
        """The masks of a row's rounds up to `number`: a resumed run may find later ones in the file."""
        rounds = self.masks[key][: number + 1]
        return Masks(torch.cat([it.dropped for it in rounds]), torch.cat([it.losses for it in rounds]))
