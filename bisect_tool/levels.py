"""What a pass says of one site: whether it agrees, and how far it is off."""

from __future__ import annotations

import math

from bisect_hooks.site import Site

from bisect_tool.flow import site_name
from bisect_tool.forward import Judged, Pass
from bisect_tool.judge import Verdict


def agrees(result: Pass, site: Site) -> bool:
    """Whether a site (or what it waits for) does not differ, on any rank that holds it."""
    keys = [one for key, one in result.judged.items() if site_name(key) == str(site)]
    noisy = [one for one in keys if one.tolerance.relative_rms]  # the others are exact copies of what is judged before them
    alike = all(result.replicas.get(one.key, 0.0) <= one.tolerance.relative_rms for one in noisy)
    return bool(keys) and alike and all(one.verdict is Verdict.AGREES for one in keys)


def level(result: Pass, site: Site) -> float:
    """The largest of a site's pieces; NaN above all."""
    found = [own for key, one in result.judged.items() if site_name(key) == str(site) and (own := size(result, one)) is not None]
    return max(found, key=lambda own: (not math.isfinite(own), own), default=math.nan)  # max() passes over NaN


def size(result: Pass, one: Judged) -> float | None:
    """How far a key is from the reference, or its replicas from each other where that is further."""
    if one.difference is None:
        return None
    apart = result.replicas.get(one.key, 0.0) if one.tolerance.relative_rms else 0.0
    return max(one.difference.relative_rms, apart, key=lambda own: (not math.isfinite(own), own))
