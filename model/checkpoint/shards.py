"""Which files a checkpoint's tensors are in: one model.safetensors, or shards named by model.safetensors.index.json.

Must not know: what the tensors mean.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from octavo.model.checkpoint.safetensors_file import MAX_ENTRIES, SafetensorsFile, TensorEntry
from octavo.model.config import read_json_object
from octavo.model.config_fields import shown
from octavo.model.errors import CheckpointError
from octavo.wire.checkpoint_files import FileRefused, find_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Open files, and which of them has each tensor. Closed by the stack that opened them."""

    file_of: dict[str, SafetensorsFile]

    def entry(self, name: str) -> TensorEntry:
        """The tensor's header entry."""
        return self.file_of[name].entries[name]


def open_shards(folder: Path, stack: ExitStack) -> Shards:
    """Open every file of a checkpoint, check its header, and check that index and files agree.

    Raises CheckpointError that names every disagreement.
    """
    if (single := find(folder, SINGLE)) is not None:
        file = stack.enter_context(SafetensorsFile(single))
        return Shards(dict.fromkeys(file.entries, file))
    if find(folder, INDEX) is None:
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there{pickle_hint(folder)}")
    weight_map = read_weight_map(folder)
    problems = list(unmentioned_shards(folder, set(weight_map.values())))
    files, broken = open_all(folder, sorted(set(weight_map.values())), stack)
    problems += broken or index_mismatches(weight_map, files)
    if problems:
        raise CheckpointError(f"{INDEX} and its shards do not fit together:", tuple(problems))
    return Shards({name: files[shard] for name, shard in weight_map.items()})


def find(folder: Path, name: str) -> Path | None:
    """`find_file`, with its refusals as CheckpointError."""
    try:
        return find_file(folder, name)
    except FileRefused as error:
        raise CheckpointError(str(error)) from None


def open_all(folder: Path, names: list[str], stack: ExitStack) -> tuple[dict[str, SafetensorsFile], list[str]]:
    """(the files that could be opened, by name; what is wrong with the others)."""
    files: dict[str, SafetensorsFile] = {}
    problems: list[str] = []
    for name in names:
        try:
            files[name] = stack.enter_context(SafetensorsFile(find(folder, name) or folder / name))
        except CheckpointError as error:
            problems.append(str(error))
    return files, problems


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index. Raises CheckpointError, also for a file name that leads elsewhere."""
    weight_map = read_json_object(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is not an object with tensors")
    wrong = tuple(
        f"{name if name.isprintable() else shown(name)}: {shown(shard)} is not the plain name of a .safetensors file"
        for name, shard in weight_map.items()
        if not is_plain_name(shard)
    )
    if wrong:
        raise CheckpointError(f"{INDEX}: shard names are refused:", wrong)
    for name in weight_map:
        if not name.isprintable():
            raise CheckpointError(f"{INDEX}: weight_map has {shown(name)}, which is no name of a tensor")
    if len(weight_map) > MAX_ENTRIES or len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{INDEX}: names more than {MAX_ENTRIES} tensors or {MAX_SHARDS} files")
    return weight_map


def is_plain_name(shard: object) -> bool:
    """Whether it names a .safetensors file in the folder itself. Half a surrogate pair, which JSON can hold but no
    path, is not printable."""
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or not shard.isprintable():
        return False
    return not any(bad in shard for bad in ("/", "\\", "\0", ":")) and not shard.startswith(".")


def index_mismatches(weight_map: dict[str, str], files: dict[str, SafetensorsFile]) -> list[str]:
    """Tensors that are not where the index says, and tensors of shards that the index does not list there."""
    problems = [
        f"{shard}: {name}: the index says that it is there, and it is not"
        for name, shard in weight_map.items()
        if name not in files[shard].entries
    ]
    copies = Counter(name for file in files.values() for name in file.entries)
    for shard, file in files.items():
        for name in file.entries:
            if weight_map.get(name) != shard:
                where = f"; it is in {copies[name]} shards" if copies[name] > 1 else ""
                problems.append(f"{shard}: {name}: the index does not put it there{where}")
    return problems


def unmentioned_shards(folder: Path, mentioned: set[str]) -> list[str]:
    """Shards in the folder that the index does not mention."""
    there = {path.name for path in folder.glob("model-*.safetensors")}
    return [f"{name}: is in the folder, but not in the index" for name in sorted(there - mentioned)]


def pickle_hint(folder: Path) -> str:
    """A hint if the folder only has weights in pickle form."""
    if not any(folder.glob("*.bin")) and not any(folder.glob("*.pt*")):
        return ""
    return " (pickled weights are there; they are never loaded, since that would run code: convert them to safetensors)"
