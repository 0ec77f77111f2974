"""The entry of launchd or cron that learns at night, if the machine is idle and on mains power.

It is printed, never installed.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import sys

_HOUR = 3
_IDLE = 900  # seconds without a key or a movement of the pointer

_MAC = (
    "pmset -g batt | grep -q 'AC Power' && "
    "[ \"$(ioreg -c IOHIDSystem | awk '/HIDIdleTime/ {print int($NF/1000000000); exit}')\" "
    f"-ge {_IDLE} ]"
)
_LINUX = (
    "! grep -qs Discharging /sys/class/power_supply/*/status && "
    "awk '{exit !($3 < 0.5)}' /proc/loadavg"
)
LABEL = "redrafter-mlx.learn"


def entry(model: str | None, minutes: float, platform: str = sys.platform) -> tuple[str, str]:
    """Return the entry for this system's scheduler, and a line on how it is installed."""
    program = shutil.which("redrafter-mlx") or os.path.abspath(sys.argv[0])
    learn = [program, "learn", *([model] if model else []), "--minutes", f"{minutes:g}"]
    command = shlex.join(learn)
    if cache := os.environ.get("REDRAFTER_CACHE"):
        command = f"env {shlex.quote(f'REDRAFTER_CACHE={cache}')} {command}"
    if platform != "darwin":
        line = f"0 {_HOUR} * * * {_LINUX} && {command}".replace("%", r"\%")
        return line, "add this line with `crontab -e`:"
    agent = {
        "Label": LABEL,
        "ProgramArguments": ["/bin/sh", "-c", f"{_MAC} && exec {command}"],
        "StartCalendarInterval": {"Hour": _HOUR, "Minute": 0},
        "ProcessType": "Background",
    }
    where = f"~/Library/LaunchAgents/{LABEL}.plist"
    how = f"write this to {where}, then run `launchctl bootstrap gui/$(id -u) {where}`:"
    return plistlib.dumps(agent).decode().rstrip("\n"), how
