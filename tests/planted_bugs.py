#!/usr/bin/env python3
"""Plants the known mistakes of planted_bugs.toml, one at a time, and shows that the tests named with each fail.

    tests/planted_bugs.py                 all mistakes; a mistake that no test finds lacks a test
    tests/planted_bugs.py NAME...         only these
    tests/planted_bugs.py --journal ...   a replay of the golden journal instead of the tests
    tests/planted_bugs.py --check         without a build: every text occurs once, and every filter matches a test

Builds a copy of the last commit, under target/planted_bugs.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600
# The targets whose tests find bugs, and their folders.
TARGETS = {"integration": "tests/integration", "model": "crates/model/tests/model", "store": "crates/store/tests/store", "sim": "crates/engine/tests/sim"}
TEST = re.compile(r"#\[(?:tokio::)?test\b[^\]]*\](?:\s*#\[[^\]]*\])*\s*(?:pub )?(?:async )?fn (\w+)")


def edits(bug):
    return bug.get("edits", [bug])


def sources(root):
    """Rust files by their paths without `src`."""
    folders = [folder for folder in ("src", "crates") if (root / folder).is_dir()]
    found = [path for folder in folders for path in (root / folder).rglob("*.rs")]
    return {"/".join(part for part in path.relative_to(root).parts if part != "src"): path for path in found}


def planted(root, bug):
    """The changed texts of a bug by path, and what keeps it from being planted."""
    texts, problems, files = {}, [], sources(root)
    for edit in edits(bug):
        paths = [path for name, path in files.items() if f"/{name}".endswith(f"/{edit['file']}")]
        if len(paths) != 1:
            problems.append(f"{edit['file']}: {len(paths)} files have this name")
            continue
        text = texts.get(paths[0]) or paths[0].read_text()
        count = text.count(edit["find"])
        if count != 1:
            problems.append(f"{paths[0].relative_to(root)}: this occurs {count} times, not once:\n        {edit['find']}")
        texts[paths[0]] = text.replace(edit["find"], edit["replace"])
    return texts, problems


def tests_in_tree():
    """Names of the tests in all targets, by a search for their attributes."""
    names = []
    for folder in map(ROOT.joinpath, TARGETS.values()):
        for path in folder.rglob("*.rs"):
            module = path.relative_to(folder).with_suffix("").parts
            module = module[:-1] if module[-1] in ("main", "mod") else module
            names += ["::".join((*module, test)) for test in TEST.findall(path.read_text())]
    return names


def check(bugs):
    tests, problems = tests_in_tree(), 0
    for name, bug in bugs.items():
        found = planted(ROOT, bug)[1]
        found += [f"no test matches {f!r}" for f in bug["tests"] if not any(f in test for test in tests)]
        for problem in found:
            print(f"planted bug {name}: {problem}", file=sys.stderr)
        problems += len(found)
    if problems:
        print("a change moved or renamed these: correct tests/planted_bugs.toml", file=sys.stderr)
    return problems == 0


def run(name, bug, copy, by_journal, environment):
    """The result of one bug, and whether it was found."""
    git = ["git", "-C", copy]
    subprocess.run([*git, "checkout", "--quiet", "."], check=True)
    texts, problems = planted(pathlib.Path(copy), bug)
    if problems:
        return "does not apply: " + "; ".join(problems), False
    for path, text in texts.items():
        path.write_text(text)
    targets, arguments = (["journal"], []) if by_journal else (TARGETS, bug["tests"])
    command = ["cargo", "test", "--quiet", "--locked", *(f"--test={target}" for target in targets)]

    def cargo(*arguments, **options):
        return subprocess.run([*command, *arguments], cwd=copy, env=environment, text=True, capture_output=True, **options)

    built = cargo("--no-run")
    if built.returncode:
        return "does not build:\n" + built.stderr, False
    for test_filter in arguments:
        listed = cargo("--", "--list", test_filter)
        if ": test" not in listed.stdout:
            return f"no test matches {test_filter!r}", False
    try:
        done = cargo("--", *arguments, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return "found: a timeout", True
    if done.returncode == 0:
        return "SURVIVED", False
    pattern = r"^(\w+ call \d+.*|\w+: .*)$" if by_journal else r"^    (\w+(?:::\w+)+)$"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    found = [line for line in found if not line.startswith("journal: ")] if by_journal else sorted(set(found))
    return f"found by {found[0][:160] if found else 'a failure: ' + done.stdout[-300:]}", True


def main(arguments):
    with open(ROOT / "tests" / "planted_bugs.toml", "rb") as file:
        bugs = tomllib.load(file)
    if "--check" in arguments:
        return check(bugs)
    names = [argument for argument in arguments if not argument.startswith("--")] or list(bugs)
    target = ROOT / "target" / "planted_bugs"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    all_found = True
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", copy, "HEAD"], cwd=ROOT, check=True)
        try:
            for name in names:
                result, found = run(name, bugs[name], copy, "--journal" in arguments, environment)
                print(f"{name:<32} {result}", flush=True)
                all_found &= found
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)
    return all_found


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
