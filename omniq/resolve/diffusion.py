"""Pipelines for models of diffusers: encode, denoise, decode, by what model_index.json says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, ModelFamily, as_flags
from omniq.resolve.files import MODEL_INDEX, ModelFiles

#: Longest side that is served unless an override says otherwise, in pixels.
LONGEST_PICTURE = 2048
LONGEST_VIDEO = 1280
MOST_FRAMES = 161
#: Pictures of one request, for models that take several: each is as many tokens as one made.
MOST_PICTURES = 8
Pictures = Literal["none", "optional", "required"]
#: Components without which there is no staged pipeline.
PARTS = ("text_encoder", "transformer", "vae", "scheduler")
#: Those that pipelines by the general rules may have beside text encoders and tokenizers, and what
#: decodes by them.
OTHER_PARTS = ("transformer", "vae", "scheduler", "safety_checker", "feature_extractor")
OTHER_VAE = "AutoencoderKL"
#: Pixels along one side of a latent patch where the model's files do not say.
#: Parameters that are scales of guidance.
SCALES = ("guidance_scale", "true_cfg_scale")
USUAL_MULTIPLE = 16


class DiffusionFamily(ModelFamily):
    """A family of diffusion models, as three stages of the ``diffusers`` engines.

    A subclass says what its pipelines take. ``defaults`` are those of the pipeline's ``__call__``;
    what is left out there is the model's own.
    """

    stages: ClassVar[tuple[str, ...]] = ("encode", "dit", "decode")
    #: Pipeline classes by ``_class_name`` of model_index.json.
    classes: ClassVar[tuple[str, ...]]
    #: What comes out.
    makes: ClassVar[Literal["image", "video"]] = "image"
    #: Whether a request may, or must, bring a picture.
    pictures: ClassVar[Pictures] = "none"
    #: Most pictures of one request.
    most_pictures: ClassVar[int] = 1
    #: Whether a request may bring a mask.
    masks: ClassVar[bool] = False
    #: Defaults of the DiT stage; guidance also reaches the encode stage.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: How several devices share the transformer's work (engine argument ``parallel``): its
    #: sequence, where diffusers has a plan for that, or the two forwards of a guided step.
    shared_by: ClassVar[Literal["ulysses_degree", "cfg_degree"] | None] = "ulysses_degree"
    #: Whether the text encoder is a language model that vLLM can run.
    encodes_on_vllm: ClassVar[bool] = False

    def matches(self, files: ModelFiles) -> bool:
        """By the pipeline class."""
        return files.diffusers_class in self.classes

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """Stages ``encode``, ``dit`` and ``decode``.

        Raises:
            ConfigError: the model lacks a part, or the options do not fit.
        """
        index = files.json(MODEL_INDEX) or {}
        if absent := [part for part in PARTS if not _present(index, part)]:
            raise ConfigError(
                f"{files.given}: {MODEL_INDEX} of a {files.diffusers_class} names no "
                f"{', '.join(absent)}"
            )
        args = dict(options.engine_args)
        dtype = args.pop("dtype", "auto")
        in_flight = args.pop("max_num_seqs", 16)
        picture_names = self._picture_names()
        sees = self.encoder_sees(files)
        devices, defaults = self._devices(options.gpus), self.stage_defaults(files)
        stages: list[dict[str, Any]] = [
            {
                "stage_id": "encode",
                "engine_type": "encode",
                **self._encoder(options, args),
                "input_modalities": ["text", *(["image"] if sees else [])],
                "output_modalities": ["hidden_states"],
                "max_in_flight": 32,
                "defaults": {n: v for n, v in defaults.items() if n in SCALES},
            },
            {
                "stage_id": "dit",
                "engine_type": "DiT",
                "input_modalities": ["hidden_states", *(["image"] if picture_names else [])],
                "output_modalities": ["latents"],
                "max_in_flight": in_flight,
                "defaults": defaults,
                "limits": self.limits(files),
            },
            {
                "stage_id": "decode",
                "engine_type": "decode",
                "input_modalities": ["latents"],
                "output_modalities": [self.makes],
                "max_in_flight": 8,
            },
        ]
        for stage in stages:
            stage |= {"model": files.model, "dtype": dtype, **devices[stage["stage_id"]]}
        edges = [{"from": "input.prompt", "to": "encode.prompt"}]
        edges += [{"from": "input.image", "to": "encode.image"}] if sees else []
        edges += [{"from": "encode.condition", "to": "dit.condition"}]
        edges += [{"from": f"input.{name}", "to": f"dit.{name}"} for name in picture_names]
        edges += [{"from": "dit.latents", "to": "decode.latents"}]
        return {
            "description": f"{files.given} ({self.name})",
            "inputs": {"prompt": {"type": "text"}, **picture_names},
            "stages": stages,
            "edges": edges,
            "outputs": {self.makes: {"from": f"decode.{self.makes}", "type": self.makes}},
        }

    def encoder_sees(self, files: ModelFiles) -> bool:
        """Whether the encode stage of this model looks at the picture."""
        return False

    def multiple(self, files: ModelFiles) -> int:
        """What height and width must be multiples of, in pixels: a latent patch of two."""
        vae = files.json("vae/config.json") or {}
        if blocks := vae.get("block_out_channels"):
            return int(2 ** len(blocks))
        return USUAL_MULTIPLE

    def limits(self, files: ModelFiles) -> dict[str, Any]:
        """Bounds of the DiT stage's parameters."""
        multiple = self.multiple(files)
        longest = LONGEST_PICTURE if self.makes == "image" else LONGEST_VIDEO
        side = {"min": multiple, "max": longest // multiple * multiple, "multiple_of": multiple}
        made = {"height": side, "width": side, "num_inference_steps": {"max": 100}}
        return made if self.makes == "image" else {**made, "num_frames": {"max": MOST_FRAMES}}

    def _picture_names(self) -> dict[str, Any]:
        """The inputs beside the prompt."""
        if self.pictures == "none":
            return {}
        image = {
            "type": "image",
            "required": self.pictures == "required",
            "max_items": self.most_pictures,
        }
        mask = {"mask_image": {"type": "image", "required": False}} if self.masks else {}
        return {"image": image, **mask}

    def stage_defaults(self, files: ModelFiles) -> dict[str, Any]:
        """What requests need not say."""
        return dict(self.defaults)

    def _encoder(self, options: BuildOptions, args: Mapping[str, Any]) -> dict[str, Any]:
        """Engine and engine arguments of the encode stage.

        Raises:
            ConfigError: it cannot run there, or arguments for vLLM come without vLLM.
        """
        if options.encoder == "vllm" and not self.encodes_on_vllm:
            raise ConfigError(
                f"--encoder vllm: the encoder of {self.name} runs on diffusers only",
                hint="leave --encoder out",
            )
        if options.encoder == "vllm":
            return {"engine": "vllm", "engine_args": dict(args)}
        if args:
            more = "; with --encoder vllm they are its encoder's" if self.encodes_on_vllm else ""
            raise ConfigError(
                f"{as_flags(args)}: {self.name} has no AR stage to take vLLM's engine "
                f"arguments{more}",
                hint="--stage-overrides gives each stage its own",
            )
        return {"engine": "diffusers"}

    def _devices(self, gpus: int) -> dict[str, dict[str, Any]]:
        """``devices`` (and how one stage uses several) by stage id, for that many GPUs.

        One: all share it. Two: the transformer has its own. Three or more: so have encoder and
        decoder; from four on two share the transformer's work, if it can be shared.
        """
        nothing: dict[str, Any] = {}
        if gpus < 2:
            return {"encode": nothing, "dit": nothing, "decode": nothing}
        first = {"devices": ["0"]}
        if gpus == 2:
            return {"encode": first, "dit": {"devices": ["1"]}, "decode": first}
        dit: dict[str, Any] = {"devices": ["2"]}
        if gpus >= 4 and self.shared_by is not None:
            dit = {"devices": ["2", "3"], "engine_args": {"parallel": {self.shared_by: 2}}}
        return {"encode": first, "dit": dit, "decode": {"devices": ["1"]}}


class QwenImage(DiffusionFamily):
    """Qwen-Image: Qwen2.5-VL encodes, an MMDiT denoises."""

    name = "Qwen-Image"
    description = "text (and picture, mask) to picture; the encoder also on vLLM"
    classes: ClassVar[tuple[str, ...]] = (
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageInpaintPipeline",
    )
    pictures: ClassVar[Pictures] = "optional"
    masks = True
    # The scale is the pipeline's true_cfg_scale, see the family in omniq.engines.
    defaults: ClassVar[Mapping[str, Any]] = {"num_inference_steps": 50, "guidance_scale": 4.0}
    encodes_on_vllm = True

    def stage_defaults(self, files: ModelFiles) -> dict[str, Any]:
        """Without the scale, unless the model is distilled and takes it as an input: the pipeline
        has it by default, and guides where there is a negative prompt. A scale that is named asks
        for guidance, and so for a negative prompt.
        """
        found = super().stage_defaults(files)
        if not (files.json("transformer/config.json") or {}).get("guidance_embeds"):
            del found["guidance_scale"]
        return found

    def multiple(self, files: ModelFiles) -> int:
        """Its VAE is one of videos."""
        vae = files.json("vae/config.json") or {}
        times = vae.get("temperal_downsample")
        return int(2 ** (len(times) + 1)) if times else USUAL_MULTIPLE


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: the encoder sees the picture too."""

    name = "Qwen-Image-Edit"
    description = "picture and text (and mask) to picture"
    classes: ClassVar[tuple[str, ...]] = ("QwenImageEditPipeline", "QwenImageEditInpaintPipeline")
    pictures: ClassVar[Pictures] = "required"
    encodes_on_vllm = False

    def encoder_sees(self, files: ModelFiles) -> bool:
        """Always."""
        return True


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus (2509 and later): several pictures."""

    name = "Qwen-Image-Edit-Plus"
    description = "pictures and text to picture"
    classes: ClassVar[tuple[str, ...]] = ("QwenImageEditPlusPipeline",)
    most_pictures = MOST_PICTURES
    masks = False


class ZImage(DiffusionFamily):
    """Z-Image: Qwen3 encodes, a single-stream DiT denoises."""

    name = "Z-Image"
    description = "text (and picture, mask) to picture; the encoder also on vLLM"
    classes: ClassVar[tuple[str, ...]] = (
        "ZImagePipeline",
        "ZImageImg2ImgPipeline",
        "ZImageInpaintPipeline",
    )
    pictures: ClassVar[Pictures] = "optional"
    masks = True
    defaults: ClassVar[Mapping[str, Any]] = {"num_inference_steps": 50, "guidance_scale": 5.0}
    shared_by = "cfg_degree"
    encodes_on_vllm = True


class Flux(DiffusionFamily):
    """FLUX.1: CLIP and T5 encode, an MMDiT denoises."""

    name = "FLUX.1"
    description = "text (and picture, mask) to picture"
    classes: ClassVar[tuple[str, ...]] = (
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
    )
    pictures: ClassVar[Pictures] = "optional"
    masks = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_inference_steps": 28,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
    }


class Flux2(DiffusionFamily):
    """FLUX.2 dev and klein: layers of Mistral 3 or Qwen3 encode."""

    name = "FLUX.2"
    description = "text and reference pictures to picture"
    classes: ClassVar[tuple[str, ...]] = ("Flux2Pipeline", "Flux2KleinPipeline")
    pictures: ClassVar[Pictures] = "optional"
    most_pictures = MOST_PICTURES
    defaults: ClassVar[Mapping[str, Any]] = {"num_inference_steps": 50, "guidance_scale": 4.0}


class StableDiffusion3(DiffusionFamily):
    """Stable Diffusion 3 and 3.5: two CLIPs and T5 encode, an MMDiT denoises."""

    name = "Stable Diffusion 3"
    description = "text (and picture, mask) to picture"
    classes: ClassVar[tuple[str, ...]] = (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    )
    pictures: ClassVar[Pictures] = "optional"
    masks = True
    defaults: ClassVar[Mapping[str, Any]] = {"num_inference_steps": 28, "guidance_scale": 7.0}
    shared_by = "cfg_degree"


class Wan(DiffusionFamily):
    """Wan 2.1 and 2.2: UMT5 encodes, one or two transformers denoise, a video comes out."""

    name = "Wan"
    description = "text to video"
    classes: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    makes = "video"
    defaults: ClassVar[Mapping[str, Any]] = {
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
    }

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """With frames a second, which the model was trained on: 16, or 24 of the 5B model."""
        made = super().build(files, options)
        made["stages"][2]["defaults"] = {"fps": 24.0 if _timesteps(files) else 16.0}
        return made

    def multiple(self, files: ModelFiles) -> int:
        """A patch of its VAE, which has a factor of 8, or 16 in the 5B model."""
        vae = files.json("vae/config.json") or {}
        return 2 * int(vae.get("scale_factor_spatial") or 8)


class Wan5B(Wan):
    """Wan 2.2 TI2V 5B: a first frame may come too."""

    name = "Wan 2.2 5B"
    description = "text, and a first frame if wanted, to video"
    pictures: ClassVar[Pictures] = "optional"

    def matches(self, files: ModelFiles) -> bool:
        """Each of its latent positions has a timestep of its own."""
        return super().matches(files) and _timesteps(files)


class WanImageToVideo(Wan):
    """Wan 2.1 and 2.2 from a first frame."""

    name = "Wan image to video"
    description = "first frame and text to video"
    classes: ClassVar[tuple[str, ...]] = ("WanImageToVideoPipeline",)
    pictures: ClassVar[Pictures] = "required"

    def encoder_sees(self, files: ModelFiles) -> bool:
        """Only 2.1 has an image encoder."""
        part = (files.json(MODEL_INDEX) or {}).get("image_encoder") or [None]
        return part[0] is not None


def _timesteps(files: ModelFiles) -> bool:
    return bool((files.json(MODEL_INDEX) or {}).get("expand_timesteps"))


class OtherDiffusion(DiffusionFamily):
    """Any other pipeline of diffusers that has a text encoder, a transformer and the usual VAE.

    It runs by the general rules, text in and a picture out, one request a forward. What its
    ``__call__`` does not take is refused when a request names it.
    """

    name = "other text-to-image pipelines of diffusers"
    description = "text to picture, by the general rules, which do not fit every pipeline"
    classes: ClassVar[tuple[str, ...]] = ()
    shared_by = None

    def matches(self, files: ModelFiles) -> bool:
        """By its parts: none that these stages would leave out."""
        index = files.json(MODEL_INDEX) or {}
        parts = {n for n, v in index.items() if isinstance(v, list) and _present(index, n)}
        known = all(p in OTHER_PARTS or p.startswith(("text_encoder", "tokenizer")) for p in parts)
        return (
            files.diffusers_class is not None
            and parts >= set(PARTS)
            and known
            and index["vae"][1] == OTHER_VAE
        )


def _present(index: Mapping[str, Any], part: str) -> bool:
    value = index.get(part)
    return isinstance(value, list) and bool(value) and value[0] is not None
