"""Tests of the package as a whole: YAML files, import layers, README, local paths and the wheel."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import PAIRS, pair_of
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import OmegaConf, open_dict

from dloop_train.config import CONF, PLUGINS, TYPED, Config, build, from_hydra, option
from dloop_train.drafters.base import DrafterConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dloop_train"
NOT_SETTINGS = ("cluster", "hydra")
"""Groups whose files contain settings of Hydra, not of dloop_train."""
LAYERS = {
    "types": 0,
    "config": 0,
    "runs": 0,
    "ranks": 0,
    "targets": 1,
    "data": 1,
    "drafters": 2,
    "checkpoints": 2,
    "training": 3,
    "decoding": 3,
    "phases": 4,
    "serving": 4,
    "chat": 4,
    "launch": 4,
    "__init__": 5,
    "worker": 5,
    "agent": 5,
    "stopping": 5,
    "__main__": 5,
}
STRANGERS = {"training", "decoding"}
"""Packages that must not import each other."""
RELEASED = {
    r"z-lab/.*-DFlash.*": ("dflash", "zlab_dflash", "fill_in"),
    r"(deepseek-ai/|starter:)dflash_.*": ("dflash", "deepspec_dflash", "shifted"),
    r"Huang2020/.*-Domino-b16": ("domino", "specforge_domino", "shifted"),
    r"deepseek-ai/dspark_.*": ("dspark", "deepspec_dspark", "shifted"),
    r"starter:dspark_.*": ("dspark", "speculators_dspark", "shifted"),
    r"deepseek-ai/eagle3_.*": ("eagle3", "deepspec_eagle3", None),
    r"(yuhuili/EAGLE3-|starter:eagle3_).*": ("eagle3", "specforge_eagle3", None),
    r"(Qwen/Qwen3\.5-|starter:mtp_).*": ("mtp", "qwen35_mtp", None),
    r"google/gemma-4-.*-assistant": ("mtp_assistant", "gemma4_assistant", None),
}
"""Family, layout and alignment of weights, by a pattern for their id."""

YAMLS = sorted(file for file in CONF.glob("*/**/*.yaml") if file.relative_to(CONF).parts[0] not in NOT_SETTINGS)
MODULES = sorted(PACKAGE.rglob("*.py"))


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


def choices(file: Path) -> list[str]:
    """Overrides that bring a YAML into the composed tree.

    A missing target is tiny_llama; a missing drafter is EAGLE-3, which has a pair with every target.
    """
    group, name = file.relative_to(CONF).parts[0], file.stem
    if group == "experiment":
        return [f"+experiment={name}"]
    if group == "pair":
        return pair_of(name)
    company = {"drafter": "eagle3", "target": "tiny_llama"} | {group: name}
    return [f"{'+' if key in ('drafter', 'target') else ''}{key}={value}" for key, value in company.items()]


def composed(overrides: list[str]):
    """The tree as the command composes it; values that the user must give (`???`) are filled in."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        tree = compose("config", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(tree)
    with open_dict(tree):
        del tree["hydra"]
        for key in OmegaConf.missing_keys(tree):
            OmegaConf.update(tree, key, "given")
    return tree


@pytest.mark.parametrize("file", YAMLS, ids=shown)
def test_yaml_builds_into_its_dataclass(file):
    tree = composed(choices(file))
    group = file.relative_to(CONF).parts[0]
    if group in TYPED:
        assert isinstance(build(tree[group], TYPED[group], group), TYPED[group])
    elif group in PLUGINS:
        assert isinstance(
            build(tree[group], DrafterConfig if group == "drafter" else object, group),
            get_class(tree[group]["_target_"]),
        )
    else:
        assert group in ("pair", "experiment"), f"{group} is a group that config.py does not build"
    assert isinstance(from_hydra(tree), Config)


@pytest.mark.parametrize("file", [file for file in YAMLS if file.parent.name in ("train", *PLUGINS)], ids=shown)
def test_a_yaml_says_no_default_again(file):
    """Otherwise the two could differ after one of them is changed."""
    values = option(file.parent.name, file.stem)
    kind = get_class(values["_target_"]) if "_target_" in values else TYPED[file.parent.name]
    assert [field.name for field in fields(kind) if field.name in values and values[field.name] == field.default] == []


def test_a_pair_sets_the_threshold_of_the_gate_that_has_one():
    """The paper's -0.75 for this pair; a gate without threshold and the user's own setting take precedence."""
    pair = ["+drafter=eagle3", "+target=qwen3_8b"]
    assert from_hydra(composed(pair)).gate.paper_threshold == -0.75 and from_hydra(composed(pair)).gate.by_replay
    assert from_hydra(composed([*pair, "++gate.threshold=-1.0"])).gate.threshold == -1.0
    assert from_hydra(composed(["+drafter=dflash", "+target=qwen3_8b"])).gate.paper_threshold == -0.5
    assert type(from_hydra(composed([*pair, "gate=never"])).gate).__name__ == "Never"
    with pytest.raises(ValueError, match="fields of PairConfig"):
        from_hydra(composed([*pair, "++pair.treshold=-1.0"]))


def said_briefly(name: str) -> str:
    """A name without punctuation, case and 'instruct', as in qwen3_4b -> qwen34b."""
    return re.sub(r"[^a-z0-9]|instruct", "", name.lower())


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_agrees_with_the_name_of_its_weights(pair):
    """Without this test a wrong id would be noticed only after a download."""
    config = from_hydra(composed(pair_of(pair)))
    drafter = config.drafter
    assert pair == f"{drafter.family}_{config.target.name}"
    if drafter.init != "scratch":
        says = [facts for pattern, facts in RELEASED.items() if re.fullmatch(pattern, drafter.init)]
        assert says == [(drafter.family, drafter.format, drafter.alignment or None)]
        assert said_briefly(config.target.name) in said_briefly(drafter.init)


def test_a_pair_may_start_from_another_and_the_command_line_goes_before_both():
    """domino_tiny_qwen3 builds on domino_tiny_llama, which builds on dflash_tiny_llama."""
    config = from_hydra(composed(["+drafter=domino", "+target=tiny_qwen3", "++drafter.width=3"]))
    assert (config.drafter.width, config.drafter.layers, config.drafter.gru_hidden_dim, config.train.origins) == (
        3,
        2,
        16,
        8,
    )


@pytest.mark.parametrize(
    "choice, says",
    [
        (
            ["mtp", "qwen3_8b"],
            [
                "there is no conf/pair/mtp_qwen3_8b.yaml",
                "only Qwen3.5 checkpoints carry an MTP module",
                "pairs for qwen35_9b, smollm2_135m",
                "drafter.init=scratch",
            ],
        ),
        (["mtp_assistant", "qwen3_8b"], ["Gemma 4 alone", "pairs for gemma4_12b, smollm2_135m"]),
        (["domino", "llama31_8b"], ["released for Qwen3-4B and Qwen3-8B", "drafter.alignment=<fill_in|shifted>"]),
    ],
    ids="_".join,
)
def test_a_missing_pair_is_explained(choice, says):
    with pytest.raises(ValueError) as error:
        from_hydra(composed([f"+drafter={choice[0]}", f"+target={choice[1]}"]))
    assert all(part in str(error.value) for part in says), error.value


def test_without_a_pair_the_weights_may_be_named():
    nowhere = ["+drafter=domino", "+target=llama31_8b", "++drafter.alignment=shifted"]
    assert from_hydra(composed([*nowhere, "++drafter.init=scratch"])).drafter.layers == 1
    assert (
        from_hydra(composed([*nowhere, "++drafter.init=somebody/Llama-Domino"])).drafter.init == "somebody/Llama-Domino"
    )
    with pytest.raises(ValueError, match="conf/pair/dflash_qwen3_8b.yaml is there, but drafter.init is empty"):
        from_hydra(composed(["+drafter=dflash", "+target=qwen3_8b", "++drafter.init="]))


def pair_cell(pair: str) -> str:
    """Source of a pair's weights: their publisher on the hub, a starter, or from scratch."""
    if pair not in PAIRS:
        return "-"
    drafter = composed(pair_of(pair))["drafter"]
    if drafter["init"] == "scratch":
        return "new head on the starter" if drafter.get("backbone") else "from scratch"
    return "starter" if drafter["init"].startswith("starter:") else drafter["init"].split("/")[0]


def pair_table() -> str:
    """The README's table: one row per target, without the tiny ones, and one column per drafter."""
    drafters = sorted(file.stem for file in CONF.glob("drafter/*.yaml"))
    targets = sorted(file.stem for file in CONF.glob("target/*.yaml") if not file.stem.startswith("tiny_"))
    rows = [["target", *drafters], ["---"] * (len(drafters) + 1)] + [
        [target, *(pair_cell(f"{drafter}_{target}") for drafter in drafters)] for target in targets
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_readme_has_the_table_of_pairs():
    found = re.search(r"<!-- pairs -->\n(.*?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found and found[1] == pair_table(), f"under <!-- pairs --> README.md should have\n{pair_table()}"


def test_every_group_has_options():
    found = {file.relative_to(CONF).parts[0] for file in YAMLS}
    assert found >= {"drafter", "target", "pair", "prompts", "gate", "deepspeed", "train", "experiment"}


def part(module: str) -> str:
    """dloop_train.drafters.base -> drafters; dloop_train itself -> __init__."""
    return ([*module.split("."), "__init__"])[1]


def imports(file: Path) -> set[str]:
    """Names of the modules of dloop_train that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(file)}:{node.lineno} is a relative import; write the whole name"
            if node.module != "dloop_train":
                found.add(node.module)
            else:  # a module such as ranks, or the package's own load; __version__ may be imported anywhere
                names = {alias.name for alias in node.names} - {"__version__"}
                found |= {f"dloop_train.{name}" if name in LAYERS else "dloop_train" for name in names}
    return {name for name in found if name.split(".")[0] == "dloop_train"}


@pytest.mark.parametrize("file", MODULES, ids=shown)
def test_imports_point_down(file):
    own = file.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in LAYERS, f"{shown(file)} stands in no layer; add {own} to the README and LAYERS"
    for name in imports(file):
        other = part(name)
        assert LAYERS[other] <= LAYERS[own], f"{shown(file)} imports {name} from a layer above"
        assert own == other or {own, other} != STRANGERS, (
            f"{shown(file)} imports {name}: training and decoding do not know each other"
        )


def folders_of_readme() -> list[str]:
    """Folders in README's block under "Where things are"; an indented line may name several of one folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## Where things are\n.*?```\n(.*?)```", text, re.DOTALL)
    assert block, 'README.md has no fenced block of folders under "Where things are"'
    named, outer = [], ""
    for line in filter(str.strip, block[1].splitlines()):
        names = re.match(r"\s*((?:[\w.]+/ ?)+)", line)[1].split()
        outer = outer if line.startswith(" ") else names[0]
        named += [outer + name for name in names] if line.startswith(" ") else names
    return named


def test_readme_names_every_folder_and_no_other():
    files = [*MODULES, *YAMLS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    files += (ROOT / "tests" / "golden").glob("*.md")
    files += [file for folder in ("data", "launchers") for file in (ROOT / folder).rglob("*") if file.is_file()]
    folders = {
        "/".join(file.relative_to(ROOT).parts[:-1][:2]) + "/" for file in files if "__pycache__" not in file.parts
    }
    named = folders_of_readme()
    assert folders - {"conf/"} == set(named) - {"conf/"}, "folders under 'Where things are' in README.md"
    assert len(named) == len(set(named)) and len(named) <= 32


def first_line(file: Path) -> str:
    """Description of a file: the first line of its docstring, or its first comment."""
    lines = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith(("# @package", "#!"))
    ]
    return lines[0] if lines else ""


def test_every_file_says_in_its_first_line_what_it_is_for():
    files = [*MODULES, *YAMLS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "data").glob("*.py")]
    lines = {shown(file): first_line(file) for file in files if file.read_text(encoding="utf-8").strip()}
    assert not {name for name, line in lines.items() if not line.startswith(('"""', 'r"""', "#"))}
    found = list(lines.values())
    assert not {line for line in found if found.count(line) > 1}


def test_no_file_holds_a_path_of_one_machine():
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    machine = re.compile(rb"(?<![\w.}~-])/(?:work|home|root|Users)/\w")
    found = []
    for name in listed:
        file = ROOT / name
        if file.is_file() and machine.search(file.read_bytes()):
            found.append(name)
    assert not found, f"paths of one machine stand in {found}"


def test_wheel_runs_in_an_empty_directory(tmp_path):
    """The wheel contains conf/ and data/: its files alone compose a run and include the starters and the prompts."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install dloop_train[test]")
    built, empty = tmp_path / "built", tmp_path / "empty"
    empty.mkdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    alone = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "DLOOP_ROOT": str(tmp_path / "root")}
    where = subprocess.run(
        [sys.executable, "-c", "import dloop_train; print(dloop_train.__file__)"],
        cwd=empty,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "site")
    command = [sys.executable, "-m", "dloop_train", "+drafter=dflash", "+target=smollm2_135m", "dry_run=true"]
    dry = subprocess.run(command, cwd=empty, env=alone, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr[-2000:]
    assert "responses/" in dry.stdout + dry.stderr and not list(empty.iterdir())
    inside = tmp_path / "site" / "dloop_train" / "data_files"
    assert (inside / "prompts" / "builtin.jsonl").is_file() and (
        inside / "starters" / "dflash_smollm2_135m" / "model.safetensors"
    ).is_file()
