"""The systemd unit: its command is understood, systemd takes it, and it is allowed little."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from kvpager.cli.main import build_parser
from tests.deploy.front import DEPLOY

UNIT = DEPLOY / "kvpager.service"
SECTIONS = ["Unit", "Service", "Install"]
HARDENED = {
    "DynamicUser": "yes",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectControlGroups": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
    "LimitCORE": "0",
    "StateDirectoryMode": "0700",
}


def settings() -> dict[str, list[str]]:
    """All settings with their values, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    sections = []
    for line in UNIT.read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            sections.append(match[1])
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            assert re.fullmatch(r"[A-Za-z]+", name), line
            found[name].append(value)
    assert sections == SECTIONS
    return found


def test_its_command_is_understood_and_writes_where_it_may() -> None:
    said = settings()
    program, *arguments = shlex.split(said["ExecStart"][0])
    assert program == "/opt/kvpager/bin/kvpager"
    args = build_parser().parse_args(arguments)
    assert args.host == "127.0.0.1"
    state = Path("/var/lib") / said["StateDirectory"][0]
    assert [Path(store).parent for store in args.store] == [state]
    assert said["Environment"] == [f"XDG_CACHE_HOME=/var/cache/{said['CacheDirectory'][0]} HOME={state}"]
    assert float(said["TimeoutStopSec"][0]) > args.grace


def test_it_is_allowed_little() -> None:
    said = settings()
    assert {name: said[name] for name in HARDENED} == {name: [value] for name, value in HARDENED.items()}
    assert said["EnvironmentFile"] == ["-/etc/kvpager/kvpager.env"]  # and no secret is in the unit itself
    assert "KEY" not in " ".join(said["ExecStart"] + said["Environment"])


def test_systemd_takes_it(tmp_path: Path) -> None:
    """Where systemd is installed; its own words are checked above everywhere."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    copy = tmp_path / "kvpager.service"
    copy.write_text(UNIT.read_text().replace("/opt/kvpager/bin/kvpager", sys.executable))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = [analyze, "security", "--offline=yes", "--json=short", "--threshold=20", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"its exposure is more than 2.0 of 10:\n{done.stdout}{done.stderr}"
    assert json.loads(done.stdout)
