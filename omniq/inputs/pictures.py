"""Pictures of a request as pixels."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from omniq.errors import OmniqError
from omniq.inputs.faults import invalid, too_large, unsupported
from omniq.settings import get_settings

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

Made = TypeVar("Made")
#: What can be read; few formats, because each is a parser that strangers feed.
FORMATS = ("PNG", "JPEG", "WEBP")


def pixels_of(value: Any, field: str, most_pixels: int) -> Pixels:
    """A picture as uint8 [H, W, 3], turned as its EXIF orientation says, transparency dropped.

    The same as ``diffusers.utils.load_image`` makes of it. Its size is looked at before anything
    is decoded.

    Args:
        value: a file's bytes, a PIL image, or an array uint8 [H, W, 3].
        field: names the input in errors.
        most_pixels: of the pipeline; the setting's bound holds too.

    Raises:
        InputTooLarge: too many pixels.
        UnsupportedInput: the bytes are no PNG, JPEG or WebP.
        InvalidRequest: something else, or a file that is broken.
    """
    import numpy as np  # noqa: PLC0415 - only requests with pictures need it
    from PIL import Image as PILImage  # noqa: PLC0415 - as above

    most = min(most_pixels, get_settings().max_image_pixels)
    if isinstance(value, bytes):
        return read_file(value, field, most, partial(_decoded, field=field))
    if isinstance(value, PILImage.Image):
        _check_pixels(value.size, field, most)
        return _decoded(value, field)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
            raise invalid(
                field, f"an array must be uint8 [H, W, 3], is {array.dtype} {list(array.shape)}"
            )
        _check_pixels((array.shape[1], array.shape[0]), field, most)
        return np.ascontiguousarray(array)
    raise invalid(field, f"must be a picture, not {type(value).__name__}")


def transparency_of(data: bytes, field: str, most_pixels: int) -> Pixels:
    """A mask, uint8 [H, W, 3]: 255 where the file's picture is wholly transparent, else 0.

    Raises:
        InputTooLarge, UnsupportedInput, InvalidRequest: as :func:`pixels_of`; also a picture
            without an alpha channel.
    """
    most = min(most_pixels, get_settings().max_image_pixels)
    return read_file(data, field, most, partial(_transparency, field=field))


def read_file(
    data: bytes,
    field: str,
    most: int,
    made: Callable[[Image], Made],
    formats: tuple[str, ...] = FORMATS,
) -> Made:
    """What ``made`` makes of a picture's file, whose size is looked at before it is decoded.

    Raises:
        InputTooLarge, UnsupportedInput, InvalidRequest: as :func:`pixels_of`.
    """
    from PIL import Image as PILImage  # noqa: PLC0415 - as above
    from PIL import UnidentifiedImageError  # noqa: PLC0415 - as above

    try:
        with PILImage.open(io.BytesIO(data), formats=formats) as image:
            _check_pixels(image.size, field, most)
            return made(image)
    except UnidentifiedImageError as exc:
        raise unsupported(field, f"must be a {', '.join(formats)} file") from exc
    except PILImage.DecompressionBombError as exc:
        raise too_large(field, f"must have at most {most} pixels: {exc}") from exc
    except (OmniqError, MemoryError):
        raise
    except Exception as exc:  # broken files take Pillow's readers anywhere: struct.error, TypeError
        raise invalid(field, f"the picture cannot be decoded: {exc}") from exc


def _decoded(image: Image, field: str) -> Pixels:
    import numpy as np  # noqa: PLC0415 - as above
    from PIL import Image as PILImage  # noqa: PLC0415 - as above
    from PIL import ImageOps  # noqa: PLC0415 - as above

    try:
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I"):  # 16 bits of grey, which PIL would clip
            grey = np.asarray(turned).astype(np.int64).clip(0, 65_535) >> 8
            turned = PILImage.fromarray(grey.astype(np.uint8))
        return np.array(turned.convert("RGB"))
    except MemoryError:
        raise
    except Exception as exc:  # as above
        raise invalid(field, f"the picture cannot be decoded: {exc}") from exc


def _transparency(image: Image, field: str) -> Pixels:
    import numpy as np  # noqa: PLC0415 - as above
    from PIL import ImageOps  # noqa: PLC0415 - as above

    if not image.has_transparency_data:
        raise invalid(field, "must have an alpha channel: what is transparent is made anew")
    alpha = np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[..., 3]
    return np.repeat(np.where(alpha == 0, 255, 0).astype(np.uint8)[..., None], 3, axis=2)


def _check_pixels(size: tuple[int, int], field: str, most: int) -> None:
    width, height = size
    if width * height > most:
        raise too_large(
            field, f"must have at most {most} pixels, has {width} x {height} = {width * height}"
        )
