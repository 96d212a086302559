"""The shape world: scenes, their captions, the prompts people write for them, and pictures.

A scene is one object in the centre, two objects in a relation, or a row of equal objects, on one
of four backgrounds. Three texts belong to it: the *caption* (canonical, complete), *prompts*
(short, with synonyms and left-out attributes) and the *picture* (drawn by PIL). `parse` reads both
kinds of text back into a scene; attributes that a text does not mention are `None`.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from PIL import Image, ImageDraw

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (245, 215, 50),
    "green": (50, 165, 75),
    "blue": (45, 95, 225),
    "purple": (140, 60, 185),
    "pink": (245, 130, 180),
    "black": (25, 25, 28),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "gray": (165, 168, 172),
    "beige": (235, 220, 190),
    "navy": (22, 32, 72),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring", "diamond", "cross")
SIZES = ("small", "large")
RELATIONS = ("above", "below", "left of", "right of")
COUNTS = {2: "two", 3: "three"}

_Words = dict[str, tuple[str, ...]]
_COLOR_WORDS: _Words = {
    "red": ("crimson", "scarlet"),
    "blue": ("azure",),
    "green": ("emerald",),
    "purple": ("violet",),
    "yellow": ("golden",),
}
_SHAPE_WORDS: _Words = {
    "circle": ("ball", "disc", "dot"),
    "square": ("box",),
    "ring": ("hoop",),
    "cross": ("plus sign",),
    "diamond": ("rhombus",),
}
_RELATION_WORDS: _Words = {
    "above": ("over", "on top of"),
    "below": ("under", "beneath"),
    "left of": ("to the left of",),
    "right of": ("to the right of",),
}
_SIZE_WORDS: _Words = {"small": ("tiny", "little"), "large": ("big", "huge")}
_BACKGROUND_WORDS: _Words = {"gray": ("grey",)}
_OPENINGS = ("draw ", "please draw ", "a picture of ", "an image of ", "show me ")
HELD_OUT_BUCKETS = 16
"""One text in this many is kept out of training."""


@dataclass(frozen=True)
class Thing:
    """One object. `None` stands for "not mentioned"."""

    size: str | None
    color: str | None
    shape: str | None


@dataclass(frozen=True)
class Scene:
    """What a caption, a prompt or a picture says. `None` stands for "not mentioned".

    `kind` is "one", "pair" or "row"; `second` and `relation` belong to pairs, `count` is the
    number of objects.
    """

    kind: str
    background: str | None
    first: Thing
    second: Thing | None = None
    relation: str | None = None
    count: int = 1

    def things(self) -> list[Thing]:
        """The distinct objects, in caption order (a row has one)."""
        return [self.first] if self.second is None else [self.first, self.second]


def is_held_out(text: str) -> bool:
    """Whether this caption or prompt belongs to the evaluation split (a hash decides)."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_BUCKETS == 0


def _draw_scene(rng: random.Random) -> Scene:
    background = rng.choice(list(BACKGROUNDS))
    colors = [c for c in COLORS if (background, c) != ("navy", "black")]

    def thing() -> Thing:
        return Thing(rng.choice(SIZES), rng.choice(colors), rng.choice(SHAPES))

    kind = rng.choices(("one", "pair", "row"), (0.35, 0.5, 0.15))[0]
    if kind == "one":
        return Scene(kind, background, thing())
    if kind == "pair":
        return Scene(kind, background, thing(), thing(), rng.choice(RELATIONS), 2)
    return Scene(kind, background, replace(thing(), size=None), count=rng.choice(list(COUNTS)))


def sample_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """A random scene whose caption is in the wanted split."""
    while True:
        scene = _draw_scene(rng)
        if is_held_out(caption(scene)) == held_out:
            return scene


def _plural(word: str) -> str:
    return word + ("es" if word.endswith(("x", "s")) else "s")


def caption(scene: Scene) -> str:
    """The canonical, complete sentence of a scene with every attribute set."""
    end = f" on a {scene.background} background"
    first = f"a {scene.first.size} {scene.first.color} {scene.first.shape}"
    if scene.kind == "one":
        return f"{first} in the center{end}"
    if scene.second is not None:
        second = f"a {scene.second.size} {scene.second.color} {scene.second.shape}"
        return f"{first} {scene.relation} {second}{end}"
    shapes = _plural(str(scene.first.shape))
    return f"{COUNTS[scene.count]} {scene.first.color} {shapes} in a row{end}"


def _synonym(rng: random.Random, word: str, table: _Words) -> str:
    return rng.choice((word, *table.get(word, ())))


def _thing_prompt(rng: random.Random, thing: Thing, article: bool) -> str:
    words = []
    if rng.random() < 0.3:
        words.append(_synonym(rng, str(thing.size), _SIZE_WORDS))
    if rng.random() < 0.85:
        words.append(_synonym(rng, str(thing.color), _COLOR_WORDS))
    words.append(_synonym(rng, str(thing.shape), _SHAPE_WORDS))
    text = " ".join(words)
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}" if article else text


def _row_prompt(rng: random.Random, scene: Scene) -> str:
    words = [rng.choice((COUNTS[scene.count], str(scene.count)))]
    if rng.random() < 0.85:
        words.append(_synonym(rng, str(scene.first.color), _COLOR_WORDS))
    words.append(_plural(_synonym(rng, str(scene.first.shape), _SHAPE_WORDS)))
    return " ".join(words) + rng.choice(("", "", " in a row"))


def short_prompt(scene: Scene, rng: random.Random) -> str:
    """A prompt that a person might write for `scene`; it may leave attributes out."""
    if rng.random() < 0.08:
        return caption(scene)
    article = rng.random() < 0.5
    if scene.kind == "row":
        text = _row_prompt(rng, scene)
    else:
        text = _thing_prompt(rng, scene.first, article)
    if scene.second is not None:
        relation = _synonym(rng, str(scene.relation), _RELATION_WORDS)
        text = f"{text} {relation} {_thing_prompt(rng, scene.second, article)}"
    if scene.kind == "one" and rng.random() < 0.15:
        text += rng.choice((" in the center", " in the middle"))
    if rng.random() < 0.45:
        name = _synonym(rng, str(scene.background), _BACKGROUND_WORDS)
        text += rng.choice((f" on {name}", f", {name} background", f" on a {name} background"))
    return _dress(rng, text)


def _dress(rng: random.Random, text: str) -> str:
    if rng.random() < 0.2:
        text = rng.choice(_OPENINGS) + text
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.1 else text


def sample_prompt(rng: random.Random, held_out: bool = False) -> tuple[str, Scene]:
    """A (prompt, scene) pair; both the prompt and the caption are in the wanted split."""
    while True:
        scene = sample_scene(rng, held_out)
        for _ in range(64 if held_out else 4):
            prompt = short_prompt(scene, rng)
            if prompt == caption(scene) and held_out and rng.random() * HELD_OUT_BUCKETS > 1:
                continue  # always in the split, unlike other prompts: keep it as rare as they are
            if is_held_out(prompt) == held_out:
                return prompt, scene


def held_out_cases(count: int, seed: int = 0) -> list[tuple[str, Scene]]:
    """`count` distinct evaluation prompts with the scenes they were written for."""
    rng = random.Random(seed)
    cases: dict[str, Scene] = {}
    while len(cases) < count:
        prompt, scene = sample_prompt(rng, held_out=True)
        cases.setdefault(prompt, scene)
    return list(cases.items())


@lru_cache(maxsize=1)
def _lexicon() -> tuple[re.Pattern[str], dict[str, tuple[str, str]]]:
    """A pattern for every known word, and word -> (attribute, canonical value)."""
    words: dict[str, tuple[str, str]] = {}

    def add(attribute: str, names: tuple[str, ...], table: _Words) -> None:
        for name in names:
            for word in (name, *table.get(name, ())):
                words[word] = (attribute, name)
                if attribute == "shape":
                    words[_plural(word)] = (attribute, name)

    add("color", tuple(COLORS), _COLOR_WORDS)
    add("background", tuple(BACKGROUNDS), _BACKGROUND_WORDS)
    add("shape", SHAPES, _SHAPE_WORDS)
    add("size", SIZES, _SIZE_WORDS)
    add("relation", RELATIONS, _RELATION_WORDS)
    add("count", ("2", "3"), {str(n): (word,) for n, word in COUNTS.items()})
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b"), words


def parse(text: str) -> Scene | None:
    """Read a caption or a prompt; unmentioned attributes are `None`. `None`: not understood."""
    pattern, words = _lexicon()
    things: list[Thing] = []
    found: dict[str, str] = {}
    pending: dict[str, str] = {}
    for match in pattern.finditer(text.lower()):
        attribute, value = words[match.group(1)]
        if attribute == "shape":
            things.append(Thing(pending.get("size"), pending.get("color"), value))
            pending = {}
        elif attribute in ("size", "color"):
            pending[attribute] = value
        else:
            found[attribute] = value
    background, relation = found.get("background"), found.get("relation")
    if len(things) == 2 and relation is not None:
        return Scene("pair", background, things[0], things[1], relation, 2)
    if len(things) != 1 or relation is not None:
        return None
    if "count" in found:
        return Scene("row", background, things[0], count=int(found["count"]))
    return Scene("one", background, things[0])


def parse_caption(text: str) -> Scene | None:
    """Read a canonical caption; `None` when the text is anything else."""
    scene = parse(text)
    if scene is None or (scene.second is None) != (scene.kind != "pair"):
        return None
    if scene.kind == "row" and scene.first.size is not None:
        return None
    return scene if caption(scene) == text else None


def mentions_agree(prompt: Scene, full: Scene) -> bool:
    """Whether `full` keeps every attribute that `prompt` mentions."""
    if (prompt.kind, prompt.relation, prompt.count) != (full.kind, full.relation, full.count):
        return False
    pairs = [(prompt.background, full.background)]
    for wanted, got in zip(prompt.things(), full.things(), strict=True):
        pairs += [(wanted.size, got.size), (wanted.color, got.color), (wanted.shape, got.shape)]
    return all(wanted is None or wanted == got for wanted, got in pairs)


def fill(prompt: Scene, full: Scene) -> Scene:
    """`prompt` with what it leaves open taken from `full` (a scene of the same kind)."""

    def merge(wanted: Thing, got: Thing) -> Thing:
        return Thing(wanted.size or got.size, wanted.color or got.color, wanted.shape or got.shape)

    second = prompt.second
    if second is not None and full.second is not None:
        second = merge(second, full.second)
    return replace(
        prompt,
        background=prompt.background or full.background,
        first=merge(prompt.first, full.first),
        second=second,
    )


# Geometry, as fractions of the picture's side. The largest objects of a pair stay a pixel apart.
_ONE_RADIUS = {"small": 0.17, "large": 0.34}
_PAIR_RADIUS = {"small": 0.125, "large": 0.2}
_PAIR_OFFSET = 0.25
_ROWS = {2: ((0.28, 0.72), 0.16), 3: ((0.18, 0.5, 0.82), 0.13)}
DIRECTIONS = {"above": (0, -1), "below": (0, 1), "left of": (-1, 0), "right of": (1, 0)}
"""Where the first object of a pair lies, seen from the second: (x, y), y downwards."""


def _outline(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    """Corners of the polygonal shapes, around (x, y), with radius `r`."""
    if shape == "triangle":
        return [(x, y - r), (x - r * 0.95, y + r * 0.8), (x + r * 0.95, y + r * 0.8)]
    if shape == "diamond":
        return [(x, y - r), (x + r * 0.75, y), (x, y + r), (x - r * 0.75, y)]
    if shape == "square":
        q = r * 0.88
        return [(x - q, y - q), (x + q, y - q), (x + q, y + q), (x - q, y + q)]
    radii = (r * 1.05, r * 0.45)
    return [
        (x + math.sin(i * math.pi / 5) * radii[i % 2], y - math.cos(i * math.pi / 5) * radii[i % 2])
        for i in range(10)
    ]


def _draw(draw: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, r: float) -> None:
    """Draw one object at pixel position (x, y) of the supersampled picture."""
    color = COLORS[str(thing.color)]
    shape = str(thing.shape)

    def disc(cx: float, cy: float, radius: float) -> None:
        draw.ellipse((cx - radius, cy - radius, cx + radius, cy + radius), fill=color)

    if shape == "circle":
        disc(x, y, r)
    elif shape == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=color, width=max(1, round(r * 0.36)))
    elif shape == "cross":
        w = r * 0.34
        draw.rectangle((x - w, y - r, x + w, y + r), fill=color)
        draw.rectangle((x - r, y - w, x + r, y + w), fill=color)
    elif shape == "heart":
        lobe = r * 0.56
        disc(x - lobe * 0.88, y - r * 0.32, lobe)
        disc(x + lobe * 0.88, y - r * 0.32, lobe)
        draw.polygon(((x - r, y - r * 0.08), (x + r, y - r * 0.08), (x, y + r * 0.98)), fill=color)
    else:
        draw.polygon(_outline(shape, x, y, r), fill=color)


def layout(scene: Scene, rng: random.Random | None) -> list[tuple[Thing, float, float, float]]:
    """(thing, x, y, radius) of every object, in fractions; `rng` adds the natural jitter."""

    def jitter(a: float) -> float:
        return rng.uniform(-a, a) if rng else 0.0

    if scene.kind == "one":
        r = _ONE_RADIUS[str(scene.first.size)] * (1 + jitter(0.05))
        return [(scene.first, 0.5 + jitter(0.03), 0.5 + jitter(0.03), r)]
    if scene.second is not None:
        dx, dy = DIRECTIONS[str(scene.relation)]
        placed = []
        for sign, thing in ((1, scene.first), (-1, scene.second)):
            r = _PAIR_RADIUS[str(thing.size)] * (1 + jitter(0.05))
            x = 0.5 + sign * dx * _PAIR_OFFSET + jitter(0.015)
            placed.append((thing, x, 0.5 + sign * dy * _PAIR_OFFSET + jitter(0.015), r))
        return placed
    columns, r = _ROWS[scene.count]
    return [(scene.first, x + jitter(0.01), 0.5 + jitter(0.02), r) for x in columns]


def render(
    scene: Scene, rng: random.Random | None = None, px: int = 64, oversample: int = 4
) -> Image.Image:
    """The RGB picture of a scene, `px` wide; without `rng` the standard layout, no jitter."""
    side = px * oversample
    image = Image.new("RGB", (side, side), BACKGROUNDS[str(scene.background)])
    draw = ImageDraw.Draw(image)
    for thing, x, y, r in layout(scene, rng):
        _draw(draw, thing, x * side, y * side, r * side)
    return image.resize((px, px), Image.Resampling.LANCZOS)
