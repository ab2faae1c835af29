"""Power and heat of a Mac, from what pmset prints, and what of it slows the GPU or ends its work."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlxdist.base.validation import checked, number, one_of, or_null

__all__ = ["Power", "PowerProblem", "power_settings", "speed_limit"]

# Macs that have High Power Mode print powermode, in place of lowpowermode: 0 automatic, 1 low, 2 high.
_LOW_POWER = ("lowpowermode", "powermode")


def power_settings(text: str) -> dict[str, int]:
    """The settings in the output of `pmset -g`: {"sleep": 1, "SleepDisabled": 0}, with times in minutes."""
    return {name: int(value) for name, value in re.findall(r"^\s*(\w+)\s+(\d+)\b", text, re.MULTILINE)}


def speed_limit(text: str) -> int | None:
    """Percent of the full speed that heat leaves, by `pmset -g therm`; None where nothing has been recorded.

    Nothing ever may be on Apple silicon: all reports of a value are of Macs with Intel processors.
    """
    found = re.search(r"^\s*CPU_Speed_Limit\s*=\s*(\d{1,3})\s*$", text, re.MULTILINE)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class PowerProblem:
    """``slows``: the Mac computes more slowly meanwhile; otherwise a setting that may end GPU work."""

    text: str
    remedy: str
    slows: bool = True


@dataclass(frozen=True)
class Power:
    """Settings and state of a Mac that decide how fast its GPU works, and whether macOS ends that work."""

    low_power: str | None = checked(or_null(one_of(_LOW_POWER)))  # the setting that has Low Power Mode on
    speed: int | None = checked(or_null(number(0, 999)))  # percent that heat leaves; None: not known
    display_sleep: int | None = checked(or_null(number(0, 2**63)))  # in minutes, 0: never

    @classmethod
    def of(cls, settings: Mapping[str, int], speed: int | None) -> "Power":
        """The power of a Mac with these `power_settings` and this `speed_limit`."""
        low_power = next((name for name in _LOW_POWER if settings.get(name) == 1), None)
        return cls(low_power, speed, settings.get("displaysleep"))

    def problems(self) -> list[PowerProblem]:
        """Lists what slows the Mac, or may end its GPU work; nothing of heat that is not known."""
        found = []
        if self.low_power:
            remedy = f"sudo pmset -a {self.low_power} 0"
            found.append(PowerProblem("Low Power Mode is on, which slows the GPU", remedy))
        if self.speed is not None and self.speed < 100:
            remedy = "let it cool, and give it air; results are not comparable until then"
            found.append(PowerProblem(f"heat leaves {self.speed} % of its speed (pmset -g therm)", remedy))
        if self.display_sleep == 0:
            text = "its display never sleeps: macOS ends long GPU work while one is on (Impacting Interactivity)"
            found.append(PowerProblem(text, "sudo pmset -a displaysleep 10, or no display", slows=False))
        return found
