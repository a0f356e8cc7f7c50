"""The documentation: links resolve, commands compose, settings and quoted messages exist, pages keep their lengths."""

import ast
import importlib.util
import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from conftest import composed
from hydra.errors import HydraException
from hydra.utils import get_class

from dloop_train.__main__ import as_set_or_add
from dloop_train.config import CONF, PLUGINS, TYPED, option

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^    (python -m dloop_train(?: [^\n]*)?|sbatch [^\n]*|bash launchers/quickstart\.sh[^\n]*)$", re.M
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def settings() -> dict[str, set[str]]:
    """Section -> names of its settings; a plug-in's section has those of all its YAMLs."""
    found = {name: {field.name for field in fields(kind)} for name, kind in TYPED.items()}
    for name in PLUGINS:
        kinds = [get_class(option(name, path.stem)["_target_"]) for path in (CONF / name).glob("*.yaml")]
        found[name] = {field.name for kind in kinds if is_dataclass(kind) for field in fields(kind)}
    return found


SETTINGS = settings()
FILES = {"md", "py", "json", "jsonl", "html", "yaml", "ai"}
"""What else follows such a word and a dot: the ends of file names, and of a host's."""


@each_page
def test_every_setting_exists(page):
    text = re.sub(r"^```python.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = re.findall(rf"(?<![\w/.])({'|'.join(SETTINGS)})\.([a-z_0-9]+)", text)
    assert not {f"{section}.{name}" for section, name in named if name not in SETTINGS[section] | FILES}


@each_page
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if not link.startswith("http") and not (page.parent / link.split("#")[0]).exists()]
    assert not gone


def commands(page: Path) -> list[str]:
    """Commands of the page that start a run, continued lines joined; not those with a shell variable or a <blank>."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = [re.sub(r"\s+#.*$", "", command) for command in COMMAND.findall(text)]
    return [command for command in found if not re.search(r"[$<]|--help|\.chat|\.engines", command)]


def overrides(command: str, prompts: Path) -> list[str]:
    words = shlex.split(command)
    if words[0] == "sbatch":
        words = [word for word in words[1:] if not word.startswith("--") and "launchers/" not in word]
    else:
        words = ["+experiment=quickstart", *words[2:]] if words[0] == "bash" else words[3:]
    words = [re.sub(r"=[\w/.-]*\.jsonl$", f"={prompts}", word) for word in words]  # a file of the reader's own
    return [as_set_or_add(word) for word in words]


@each_page
def test_every_command_composes(page, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "Count.", "id": "a"}\n')
    failed = []
    for command in commands(page):
        try:
            composed(*overrides(command, prompts))
        except (ValueError, HydraException) as error:
            failed.append(f"{command}: {error}")
    assert not failed, "\n".join(failed)


def test_the_pages_have_commands():
    """The law above would hold for pages without any."""
    assert len(commands(ROOT / "README.md")) >= 2 and sum(len(commands(page)) for page in PAGES) >= 40


@each_page
def test_pages_keep_their_lengths(page):
    """README: 10 kB, lines of 100 characters; other pages: 300 lines of 120. Printed tables keep their own width."""
    text, readme = page.read_text(encoding="utf-8"), page.name == "README.md"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S) if not readme else text
    if page.name != "settings.md":  # a reference, as long as there are settings
        assert len(text.encode()) <= 10_000 if readme else len(text.splitlines()) <= 300
    assert not [line for line in prose.splitlines() if len(line) > (100 if readme else 120)]


def test_every_page_is_in_the_site():
    """mkdocs build --strict checks the links; it only warns of pages that are not in the navigation."""
    named = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    index = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted({*index, "index.md"}) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_settings_page_is_the_dataclasses():
    """python docs/make_settings.py writes it."""
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == made.page(), (
        "run python docs/make_settings.py"
    )


def strings_of_package() -> list[str]:
    """Every string of the package, with NUL where a value is filled in."""
    found = []
    for file in (ROOT / "dloop_train").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


FOREIGN = ("Error resolving", "Could not override", "Key '", "Value '", "Structured config", "choose a drafter")
"""Parts of messages that other packages print."""
FILLED = r"\.\.\.|\b401\b|\bfill_in\b|\bzero1\b|\bfalse\b"
"""What stands for a value in a quoted message."""


def test_quoted_messages_are_the_packages_own():
    page, strings = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), strings_of_package()
    quoted = [quote for line in page.splitlines() if line.startswith("- `") for quote in re.findall(r"`([^`]+)`", line)]
    gone = []
    for message in quoted:
        pieces = [piece.strip(" :,.()'$") for piece in re.split(FILLED, message)]
        if not any(foreign in message for foreign in FOREIGN):
            gone += [piece for piece in pieces if len(piece) > 3 and not any(piece in one for one in strings)]
    assert len(quoted) > 30 and not gone
