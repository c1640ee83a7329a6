#!/usr/bin/env python3
"""Plants the known mistakes of planted_bugs.toml, and shows that the tests named with each fail.

    tests/planted_bugs.py                 all mistakes; a mistake that no test finds lacks a test
    tests/planted_bugs.py NAME...         only these
    tests/planted_bugs.py --journal ...   a replay of the golden journal instead of the tests
    tests/planted_bugs.py --check         without a build: every text occurs once, and every filter matches a test

Builds a copy of the last commit, under target/planted_bugs. One build holds all mistakes: a function with a mistake
has a body with it and a body without it, and the variable PLANTED_BUG chooses. A mistake outside such a function is
built alone.
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600
# The targets whose tests find bugs, the fastest first: options of Cargo, and folders.
TARGETS = {
    "model's unit tests": (["--package=rm-model", "--lib"], "crates/model/src"),
    "engine's unit tests": (["--package=rm-engine", "--lib"], "crates/engine/src"),
    "service's unit tests": (["--package=rm-service", "--lib"], "crates/service/src"),
    "store's unit tests": (["--package=rm-store", "--lib"], "crates/store/src"),
    "model": (["--test=model"], "crates/model/tests/model"),
    "sim": (["--test=sim"], "crates/engine/tests/sim"),
    "store": (["--test=store"], "crates/store/tests/store"),
    "integration": (["--test=integration"], "tests/integration"),
}
FUNCTION = re.compile(r"^( *)(?:pub(?:\([^)]*\))? )?(const )?(?:async )?fn \w")
CHOSEN = """{{ static IT: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IT.get_or_init(|| std::env::var("PLANTED_BUG").is_ok_and(|name| name == "{}")) }}"""
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
    texts, problems = {}, []
    for edit, path, problem in places(root, bug):
        if problem:
            problems.append(problem)
        else:
            texts[path] = (texts.get(path) or path.read_text()).replace(edit["find"], edit["replace"])
    return texts, problems


def places(root, bug):
    """Each replacement of a bug with its file, or with what keeps it from being planted."""
    files = sources(root)
    for edit in edits(bug):
        paths = [path for name, path in files.items() if f"/{name}".endswith(f"/{edit['file']}")]
        if len(paths) != 1:
            yield edit, None, f"{edit['file']}: {len(paths)} files have this name"
            continue
        count, problem = paths[0].read_text().count(edit["find"]), None
        if count != 1:
            problem = f"{paths[0].relative_to(root)}: this occurs {count} times, not once:\n        {edit['find']}"
        yield edit, paths[0], problem


def bodies(text):
    """Start and end of the body of each function that can have a second one; the outer before the inner."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for number, line in enumerate(lines):
        function = FUNCTION.match(line)
        opening = number
        while function and not lines[opening].rstrip().endswith(("{", ";", "}")):
            opening += 1
        header = "".join(lines[number : opening + 1])
        if not function or function[2] or not header.rstrip().endswith("{") or re.search(r"->[^{]*\bimpl\b", header):
            continue
        closing = lines.index(function[1] + "}\n", opening)
        yield starts[opening + 1], starts[closing]


def planted_together(root, bugs):
    """The texts by path with all bugs that can be chosen as the program runs, and the names of these."""
    texts, names, changed = {}, [], {}
    for name, bug in bugs.items():
        found = []
        for edit, path, problem in places(root, bug):
            text = path and texts.setdefault(path, path.read_text())
            start = -1 if problem else text.index(edit["find"])
            within = (body for body in bodies(text or "") if body[0] <= start and start + len(edit["find"]) <= body[1])
            found.append((edit, path, next(within, None)))
        if any(body is None for _, _, body in found):
            continue
        names.append(name)
        for edit, path, body in found:
            versions = changed.setdefault(path, {}).setdefault(body, {})
            version = versions.get(name) or texts[path][slice(*body)]
            versions[name] = version.replace(edit["find"], edit["replace"])
    for path, of_path in changed.items():
        # From the end, so that the places before keep their positions.
        for (start, end), versions in sorted(of_path.items(), reverse=True):
            choice = "".join(f"if {CHOSEN.format(name)} {{\n{text}}} else " for name, text in versions.items())
            texts[path] = f"{texts[path][:start]}{choice}{{\n{texts[path][start:end]}}}\n{texts[path][end:]}"
    return {path: texts[path] for path in changed}, names


def tests_of(target):
    """Names of the tests of a target, by a search for their attributes."""
    names, folder = [], ROOT / TARGETS[target][1]
    for path in folder.rglob("*.rs"):
        module = path.relative_to(folder).with_suffix("").parts
        module = module[:-1] if module[-1] in ("main", "mod", "lib") else module
        names += ["::".join((*module, test)) for test in TEST.findall(path.read_text())]
    return names


def check(bugs):
    tests, problems = [name for target in TARGETS for name in tests_of(target)], 0
    for name, bug in bugs.items():
        found = planted(ROOT, bug)[1]
        found += [f"no test matches {f!r}" for f in bug["tests"] if not any(f in test for test in tests)]
        for problem in found:
            print(f"planted bug {name}: {problem}", file=sys.stderr)
        problems += len(found)
    if problems:
        print("a change moved or renamed these: correct tests/planted_bugs.toml", file=sys.stderr)
    return problems == 0


def plant(copy, texts):
    subprocess.run(["git", "-C", copy, "checkout", "--quiet", "."], check=True)
    for path, text in texts.items():
        path.write_text(text)


def run(bug, copy, by_journal, environment):
    """The result of a bug that is planted, and whether it was found."""
    if by_journal:
        return tested("journal", ["--test=journal"], [], copy, environment)
    result = "no test", False
    for target, (options, _) in TARGETS.items():
        tests = tests_of(target)
        filters = [test_filter for test_filter in bug["tests"] if any(test_filter in test for test in tests)]
        if filters:
            result = tested(target, options, filters, copy, environment)
            if result[1]:
                break
    return result


def tested(target, options, filters, copy, environment):
    """The result of the tests of one target, and whether they found a bug."""
    command = ["cargo", "test", "--quiet", "--locked", *options]

    def cargo(*arguments, limit=None):
        options = {"cwd": copy, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*command, *arguments], start_new_session=True, **options)
        try:
            output = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, *output)

    built = cargo("--no-run")
    if built.returncode:
        return "does not build:\n" + built.stderr, False
    try:
        done = cargo("--", *filters, limit=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"found: {target} takes more than {TIMEOUT_SECONDS} s", True
    if done.returncode == 0:
        return "SURVIVED", False
    pattern = r"^(\w+ call \d+.*|\w+: .*)$" if target == "journal" else r"^    (\w+(?:::\w+)*)$"
    found = [line for line in re.findall(pattern, done.stdout, re.MULTILINE) if not line.startswith("journal: ")]
    found = found[0] if target == "journal" and found else " ".join(sorted(set(found)))
    return f"found by {found[:160] or 'a failure: ' + done.stdout[-300:]}", True


def main(arguments):
    with open(ROOT / "tests" / "planted_bugs.toml", "rb") as file:
        bugs = tomllib.load(file)
    if set(arguments) - set(bugs) - {"--check", "--journal"}:
        return print(__doc__, file=sys.stderr)
    if "--check" in arguments:
        return check(bugs)
    names = [argument for argument in arguments if not argument.startswith("--")] or list(bugs)
    target = ROOT / "target" / "planted_bugs"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    all_found = True
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", copy, "HEAD"], cwd=ROOT, check=True)
        try:
            texts, together = planted_together(pathlib.Path(copy), {name: bugs[name] for name in names})
            plant(copy, texts)
            for name in [*together, *(name for name in names if name not in together)]:
                problems = []
                if name not in together:
                    texts, problems = planted(pathlib.Path(copy), bugs[name])
                    plant(copy, texts)
                result, found = "does not apply: " + "; ".join(problems), False
                if not problems:
                    chosen = {**environment, "PLANTED_BUG": name if name in together else ""}
                    result, found = run(bugs[name], copy, "--journal" in arguments, chosen)
                print(f"{name:<32} {result}", flush=True)
                all_found &= found
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)
    return all_found


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
