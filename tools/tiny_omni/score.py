"""Reads pictures of the shape world back into attributes and compares them with a scene.

No model is involved: the background is the median of the border, objects are connected regions
that differ from it, an object's colour is the median of its core, its shape the best of templates
that went through the same extraction. `read_picture` knows nothing of the expected scene.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tiny_omni.shapes import (
    BACKGROUNDS,
    COLORS,
    DIRECTIONS,
    SHAPES,
    Scene,
    Thing,
    layout,
    render,
)

Array = NDArray[np.float32]

_FOREGROUND = 45.0  # RGB distance; the closest colour and background are 89 apart
_MIN_AREA = 16  # pixels; the smallest drawn object covers about 70
_PATCH = 32  # side of the normalised mask that shapes are compared on
_MARGIN = 1.2  # side of the compared window, in sides of the object's bounding box
ATTRIBUTES = ("background", "color", "shape", "size", "position", "count")


@dataclass(frozen=True)
class Blob:
    """One object found in a picture; position and radius in fractions of the side."""

    color: str
    shape: str
    x: float
    y: float
    radius: float
    area: int


@dataclass(frozen=True)
class Reading:
    """What `read_picture` saw."""

    background: str
    blobs: tuple[Blob, ...]


@dataclass
class Tally:
    """Right answers and questions, by attribute."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def add(self, results: Iterable[tuple[str, bool]]) -> None:
        """Count the results of one picture."""
        for attribute, ok in results:
            self.asked[attribute] += 1
            self.right[attribute] += int(ok)

    def accuracy(self) -> dict[str, float]:
        """Attribute -> share of right answers; "overall" is over all questions."""
        table = {a: self.right[a] / self.asked[a] for a in ATTRIBUTES if self.asked[a]}
        table["overall"] = sum(self.right.values()) / max(1, sum(self.asked.values()))
        return table


def _nearest(color: Array, table: dict[str, tuple[int, int, int]]) -> str:
    return min(table, key=lambda name: float(np.linalg.norm(color - np.array(table[name]))))


def _regions(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """4-connected regions of a boolean image [H, W], each as a mask."""
    height, width = mask.shape
    todo = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    found = []
    while todo:
        stack, members = [todo.pop()], []
        while stack:
            y, x = stack.pop()
            members.append((y, x))
            for cell in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if cell in todo:
                    todo.remove(cell)
                    stack.append(cell)
        region = np.zeros((height, width), dtype=bool)
        region[tuple(np.array(members).T)] = True
        found.append(region)
    return found


def _coverage(pixels: Array, ground: Array, color: Array, others: NDArray[np.bool_]) -> Array:
    """How much of each pixel the object covers, [H, W] in 0..1 (projection on its colour)."""
    axis = color - ground
    alpha = ((pixels - ground) @ axis) / float(axis @ axis)
    alpha[others] = 0.0
    return np.clip(alpha, 0.0, 1.0).astype(np.float32)


def _edges(profile: Array) -> tuple[float, float]:
    """Sub-pixel start and end of the part of a 1-D profile that is above one half."""
    inside = np.flatnonzero(profile > 0.5)
    if inside.size == 0:
        return 0.0, float(len(profile))
    first, last = int(inside[0]), int(inside[-1])
    before = float(profile[first - 1]) if first > 0 else 0.0
    after = float(profile[last + 1]) if last + 1 < len(profile) else 0.0
    return first - before, last + 1 + after


def _normalise(alpha: Array) -> tuple[Array, tuple[float, float, float]]:
    """The object scaled into a [_PATCH, _PATCH] window, and its centre and radius in pixels."""
    left, right = _edges(alpha.max(axis=0))
    top, bottom = _edges(alpha.max(axis=1))
    x, y = (left + right) / 2, (top + bottom) / 2
    side = max(right - left, bottom - top)
    pad = alpha.shape[0]  # so that the window never leaves the picture
    padded = Image.fromarray(np.pad(alpha, pad))
    half = side * _MARGIN / 2
    box = (x + pad - half, y + pad - half, x + pad + half, y + pad + half)
    patch = padded.resize((_PATCH, _PATCH), Image.Resampling.BILINEAR, box=box)
    return np.asarray(patch, dtype=np.float32), (x, y, side / 2)


@lru_cache(maxsize=8)
def _templates(px: int) -> tuple[tuple[str, ...], Array, Array]:
    """Shape names, masks [n, _PATCH, _PATCH] and bounding radii [n] of the standard objects."""
    names, patches, radii = [], [], []
    for shape in SHAPES:
        for scene in _template_scenes(shape):
            pixels = np.asarray(render(scene, px=px), dtype=np.float32)
            ground = np.array(BACKGROUNDS["white"], dtype=np.float32)
            color = np.array(COLORS["black"], dtype=np.float32)
            x = layout(scene, None)[0][1]
            others = np.zeros(pixels.shape[:2], dtype=bool)
            if scene.kind == "pair":
                others[:, px // 2 :] = True
            elif scene.kind == "row":
                others[:, int((x + 0.16) * px) :] = True
            patch, (_, _, radius) = _normalise(_coverage(pixels, ground, color, others))
            names.append(shape)
            patches.append(patch)
            radii.append(radius / px)
    return tuple(names), np.stack(patches), np.array(radii, dtype=np.float32)


def _template_scenes(shape: str) -> list[Scene]:
    """Scenes whose first (or leftmost) object shows `shape` at every drawn radius."""
    scenes = []
    for size in ("small", "large"):
        thing = Thing(size, "black", shape)
        scenes.append(Scene("one", "white", thing))
        scenes.append(Scene("pair", "white", thing, thing, "left of", 2))
    thing = Thing(None, "black", shape)
    return [*scenes, *(Scene("row", "white", thing, count=n) for n in (2, 3))]


def _shape_of(patch: Array, radius: float, px: int) -> str:
    names, templates, radii = _templates(px)
    difference = np.abs(templates - patch).mean(axis=(1, 2))
    far = np.abs(np.log(np.maximum(radii, 1e-3) / max(radius, 1e-3))) > 0.35
    return names[int(np.argmin(difference + 10.0 * far * (not far.all())))]


def read_picture(image: Image.Image) -> Reading:
    """Find the background and the objects, the largest first."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    px = pixels.shape[0]
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = _nearest(np.median(border, axis=0), BACKGROUNDS)
    ground = np.median(border, axis=0).astype(np.float32)
    distance = np.linalg.norm(pixels - ground, axis=-1)
    foreground = distance > _FOREGROUND
    blobs = []
    for region in _regions(foreground):
        area = int(region.sum())
        if area < _MIN_AREA * (px / 64) ** 2:
            continue
        core = region & (distance >= np.median(distance[region]))
        color = np.median(pixels[core], axis=0).astype(np.float32)
        alpha = _coverage(pixels, ground, color, foreground & ~region)
        patch, (x, y, radius) = _normalise(_near(alpha, region))
        shape = _shape_of(patch, radius / px, px)
        blobs.append(Blob(_nearest(color, COLORS), shape, x / px, y / px, radius / px, area))
    return Reading(background, tuple(sorted(blobs, key=lambda b: -b.area)))


def _near(alpha: Array, region: NDArray[np.bool_]) -> Array:
    """`alpha` without what lies outside the region and its neighbouring pixels."""
    grown = region.copy()
    grown[1:] |= region[:-1]
    grown[:-1] |= region[1:]
    grown[:, 1:] |= region[:, :-1]
    grown[:, :-1] |= region[:, 1:]
    return np.where(grown, alpha, 0.0).astype(np.float32)


def _looks_large(blob: Blob, scene: Scene) -> bool:
    """Small and large differ by bounding radius; the limits depend on the kind of scene."""
    return blob.radius > (0.245 if scene.kind == "one" else 0.158)


def _thing_results(thing: Thing, blob: Blob | None, scene: Scene) -> list[tuple[str, bool]]:
    results = [
        ("color", blob is not None and blob.color == thing.color),
        ("shape", blob is not None and blob.shape == thing.shape),
    ]
    if scene.kind != "row":
        large = blob is not None and _looks_large(blob, scene)
        results.append(("size", blob is not None and (thing.size == "large") == large))
    return results


def _related(first: Blob, second: Blob, relation: str) -> bool:
    """Whether the direction between two objects is the wanted one (within 45 degrees)."""
    dx, dy = DIRECTIONS[relation]
    along = (first.x - second.x) * dx + (first.y - second.y) * dy
    across = abs((first.x - second.x) * dy) + abs((first.y - second.y) * dx)
    return along > 0.15 and along > across


def _pair_results(scene: Scene, blobs: tuple[Blob, ...]) -> list[tuple[str, bool]]:
    """The assignment of blobs to objects that gets most attributes right."""
    assert scene.second is not None and scene.relation is not None
    options = []
    padded: tuple[Blob | None, ...] = (*blobs[:2], None, None)[:2]
    for first, second in permutations(padded):
        results = _thing_results(scene.first, first, scene)
        results += _thing_results(scene.second, second, scene)
        ok = first is not None and second is not None and _related(first, second, scene.relation)
        options.append([*results, ("position", ok)])
    return max(options, key=lambda option: sum(ok for _, ok in option))


def _row_results(scene: Scene, blobs: tuple[Blob, ...]) -> list[tuple[str, bool]]:
    """A row shares colour and shape: the object that fits worst decides each of them."""
    members = blobs[: scene.count]
    xs = sorted(b.x for b in members)
    gaps = [b - a for a, b in pairwise(xs)]
    return [
        ("color", bool(members) and all(b.color == scene.first.color for b in members)),
        ("shape", bool(members) and all(b.shape == scene.first.shape for b in members)),
        (
            "position",
            len(members) == scene.count
            and all(abs(b.y - 0.5) < 0.12 for b in members)
            and min(gaps, default=0.0) > 0.15,
        ),
    ]


def score_picture(image: Image.Image, scene: Scene) -> list[tuple[str, bool]]:
    """(attribute, right?) for every attribute that `scene` asks of the picture."""
    reading = read_picture(image)
    blobs = reading.blobs
    results = [
        ("background", reading.background == scene.background),
        ("count", len(blobs) == scene.count),
    ]
    if scene.kind == "pair":
        return results + _pair_results(scene, blobs)
    if scene.kind == "row":
        return results + _row_results(scene, blobs)
    blob = blobs[0] if blobs else None
    central = blob is not None and max(abs(blob.x - 0.5), abs(blob.y - 0.5)) < 0.12
    return [*results, *_thing_results(scene.first, blob, scene), ("position", central)]
