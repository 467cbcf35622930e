"""Let transformers' auto classes load folders that only oelm can load.

`AutoModelForCausalLM.from_pretrained(folder)` reads `model_type` from config.json. If a method adds
parameters that plain transformers cannot represent, oelm writes `model_type` "oelm" and stores the config of
the model in the field `base`. `import oelm` registers classes for this model type, which pass the folder to
`oelm.load()`. The folder contains no code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object

_CONFIG = "config.json"
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_HARMLESS = (*_HUB_OPTIONS, "config", "_from_auto", "trust_remote_code", "adapter_kwargs", "use_safetensors")


_INTERNAL = ("_from_auto", "_from_pipeline", "name_or_path")  # options that transformers adds


def _unsupported(folder: Path | str | None, option: str) -> OelmError:
    return OelmError(
        f"{folder}: oelm does not support the option {option} for this folder; leave {option} out, and "
        f"change the loaded model or its config instead"
    )


class OelmConfig(PreTrainedConfig):
    """The config of a model that only `oelm.load()` can build; the field `base` is the model's own config."""

    model_type = "oelm"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the config without changes by `options`, which would not reach the model's own config.

        With `return_unused_kwargs`, return the options, too; `_OelmModel` accepts or refuses them.
        """
        returns_unused = options.pop("return_unused_kwargs", False)
        internal = {name: options.pop(name) for name in _INTERNAL if name in options}
        config = super().from_dict(config_dict, **internal)
        if returns_unused:
            return config, options
        for name, value in options.items():
            if (hasattr(config, name) or name == "attn_implementation") and value not in (None, "auto"):
                raise _unsupported(config.name_or_path, name)
        return config


def wrap_config(folder: Path) -> None:
    """Change config.json so that transformers loads the folder through oelm, or fails without oelm."""
    fields = read_json_object(folder / _CONFIG)
    if fields.get("model_type") != OelmConfig.model_type:
        wrapped = {"model_type": OelmConfig.model_type, "architectures": fields.get("architectures")}
        write_json(folder / _CONFIG, {**wrapped, "base": fields})


def read_config(config_class: Any, folder: Path) -> Any:
    """Return the model's own config from config.json, also if `wrap_config()` has changed the file."""
    fields = read_json_object(folder / _CONFIG)
    if fields.get("model_type") != OelmConfig.model_type:
        return config_class.from_pretrained(folder)
    return config_class.from_dict(fields["base"])


def _settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if not name.startswith("_")}


class _OelmModel:
    """The model class that transformers' auto classes use for `OelmConfig`; it calls `oelm.load()`."""

    config_class = OelmConfig
    auto_class: Any

    @classmethod
    def from_pretrained(cls, name: Path | str, *_: Any, **options: Any) -> nn.Module:
        from oelm.methods.saving.load import load

        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            hub = {option: options[option] for option in _HUB_OPTIONS if option in options}
            folder = Path(snapshot_download(str(name), **hub))
        given = options.get("config")
        if given is not None and _settings(given) != _settings(OelmConfig.from_pretrained(folder)):
            raise OelmError(
                f"{name}: the given config differs from config.json of the folder, and oelm would ignore the "
                f"difference; leave config out, and change the loaded model instead"
            )
        model = load(folder)
        for option, value in options.items():
            if option in _HARMLESS or value in (None, "auto"):
                continue
            owner: Any = model if option in ("dtype", "torch_dtype") else model.config
            attribute = {"torch_dtype": "dtype", "attn_implementation": "_attn_implementation"}
            # False turns off what is off, unless the model has a setting of this name that is on.
            if getattr(owner, attribute.get(option, option), False) != value:
                raise _unsupported(name, option)
        wanted = cls.auto_class._model_mapping.get(type(model.config), ())
        if not isinstance(model, wanted):
            raise OelmError(
                f"{name} contains a {type(model).__name__}, which {cls.auto_class.__name__} does not load. "
                f"Use the auto class of its task, or oelm.load"
            )
        return model


def register_config(configuration_auto: Any) -> None:
    configuration_auto.AutoConfig.register(OelmConfig.model_type, OelmConfig, exist_ok=True)


def register_models(modeling_auto: Any) -> None:
    for name, auto_class in vars(modeling_auto).items():
        if name.startswith("AutoModel") and getattr(auto_class, "_model_mapping", None) is not None:
            model_class = type(f"Oelm{name}", (_OelmModel,), {"auto_class": auto_class})
            auto_class.register(OelmConfig, model_class, exist_ok=True)
