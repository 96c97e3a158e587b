"""The deployed models by name: which one a request means, and what clients are told of each."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.errors import CrucibleError, DamagedError, StoreError
from service.auth import Caller
from service.errors import NotFound, NotOwned, Unavailable, Unprocessable
from service.inference import Served
from service.jobs.redact import scrubbed
from service.language.generation import ServedLanguage
from service.registry.models import DeploymentView, ModelView, ServerState
from service.registry.repository import Model
from service.serving.deployed_model import DeployedModel, LeasedDeployment
from service.serving.language.deployment import not_for_tensors
from service.storage.layout import Folders

SOON_S, LATER_S = 1, 5  # `Retry-After` of what changes by itself within seconds, and of the rest


@dataclass(slots=True)
class ModelTable:
    """The deployed models of one server."""

    folders: Folders  # clients are not told their paths
    entries: dict[str, DeployedModel] = field(default_factory=dict)
    unloading: dict[str, DeployedModel] = field(default_factory=dict)  # answer their last requests
    is_started: bool = False
    is_stopping: bool = False

    # -- finding

    def visible(self, caller: Caller) -> tuple[DeployedModel, ...]:
        """The models that the caller may see, by name. The thread that reads metrics calls this,
        too.
        """
        entries = tuple(self.entries.values())
        seen = (entry for entry in entries if caller.sees in (None, entry.version.owner))
        return tuple(sorted(seen, key=lambda entry: entry.version.model))

    def find(
        self,
        caller: Caller,
        model: str | None,
        version: int | None = None,
        among: Callable[[DeployedModel], bool] = lambda entry: True,
    ) -> DeployedModel:
        """Find a deployed model. Without a name it is the only one for which `among` is true."""
        if self.closed_state and model not in self.entries:
            raise self.unavailable()  # NotFound would be wrong: the model may come back
        if model is None:
            model = only([entry.version.model for entry in filter(among, self.visible(caller))])
        entry = self.entries.get(model)
        if entry is None or caller.sees not in (None, entry.version.owner):
            refusal = NotFound if entry is None else NotOwned
            raise refusal(
                f"no model '{model}' is deployed",
                "GET /models lists yours; PUT /models/NAME/deployment loads one",
            )
        if version not in (None, entry.version.version):
            raise NotFound(
                f"version {version} of '{model}' is not deployed, {entry.version.version} is",
                "leave the version out for the current one",
            )
        return entry

    def find_with_inputs(
        self, caller: Caller, model: str | None, version: int | None
    ) -> DeployedModel:
        """Find a model that takes tensors. Unprocessable for a language model."""
        entry = self.find(caller, model, version, takes_tensors)
        if not takes_tensors(entry):
            raise not_for_tensors(entry.version.model)
        return entry

    def find_language(
        self, caller: Caller, model: str | None, version: int | None
    ) -> DeployedModel:
        """Find a language model. Unprocessable for a model that takes tensors."""
        entry = self.find(caller, model, version, takes_prompts)
        if not takes_prompts(entry):
            raise Unprocessable(
                f"'{entry.version.model}' is no language model: it takes tensors, and no prompt",
                f"send POST /models/{entry.version.model}/infer",
            )
        return entry

    def numbers_in_use(self, name: str) -> set[int]:
        """Return the numbers of the versions that answer, load or drain."""
        models = (self.entries.get(name), self.unloading.get(name))
        return {model.version.version for model in models if model is not None}

    # -- open and closed

    @property
    def closed_state(self) -> str:
        """`starting` or `stopping`: models may be missing and cannot be changed. Empty: open."""
        if self.is_stopping:
            return "stopping"
        return "" if self.is_started else "starting"

    def unavailable(self) -> Unavailable:
        """The refusal of a request while the server starts or stops."""
        state = self.closed_state
        retry_after_s = SOON_S if state == "starting" else LATER_S
        return Unavailable(f"the server is {state}", "try again in a moment", retry_after_s)

    def starting(self) -> tuple[int, int]:
        """Return the number of models that are loading, and the number of all models."""
        loading = sum(entry.state == "loading" for entry in self.entries.values())
        return loading, len(self.entries)

    # -- what clients are told

    def served(self, entry: DeployedModel) -> Served:
        """Describe a model to clients, without paths of this host.

        The last message of a worker may contain such paths.
        """
        served = entry.served()
        if not served.reason and not any(each.reason for each in served.devices):
            return served
        devices = tuple(
            each.model_copy(update={"reason": scrubbed(each.reason, self.folders)})
            for each in served.devices
        )
        return replace(served, reason=scrubbed(served.reason, self.folders), devices=devices)

    def served_language(self, entry: DeployedModel) -> ServedLanguage:
        """Describe a language model to clients, as `served` does."""
        served = self.served(entry)
        described = entry.served_language()
        return replace(described, reason=served.reason, devices=served.devices)

    def view(self, model: Model, states: Mapping[str, tuple[ServerState, ...]]) -> ModelView:
        """Describe a model with its versions. `states`: at each server, by its name."""
        entry = self.entries.get(model.name) or self.unloading.get(model.name)
        if entry is None:
            deployment = DeploymentView(
                state="unloaded", version=None, device=None, options=model.options
            )
        else:
            served, loaded = self.served(entry), entry.loaded
            deployment = DeploymentView(
                state=served.state,
                reason=served.reason,
                version=loaded.spec.version.version if loaded is not None else None,
                device=served.device,
                devices=served.devices if loaded is not None else (),
                note=loaded.spec.note if loaded is not None else "",
                options=model.options,
                memory_bytes=loaded.running.memory_bytes if loaded is not None else None,
            )
        return ModelView(
            name=model.name,
            owner=model.owner,
            current=model.version(),
            versions=model.versions,
            deployment=deployment,
            servers=states.get(model.name, ()),
        )

    def state_of(self, name: str, server: str, reason: str) -> ServerState:
        """Return the state of a model at this server, which has this id."""
        entry = self.entries.get(name) or self.unloading.get(name)
        served = self.served(entry) if entry is not None else None
        loaded = entry.loaded if entry is not None else None
        return ServerState(
            server=server,
            host=platform.node(),
            state=served.state if served is not None else "unloaded",
            version=loaded.spec.version.version if loaded is not None else None,
            reason=reason or (served.reason if served is not None else ""),
        )

    def failure_message(self, error: BaseException) -> str:
        """The message of an error for clients."""
        message = "an error inside the service; its log has the details"
        if isinstance(error, CrucibleError):
            message = error.message
        if isinstance(error, StoreError):  # its message has an address
            message = "the service cannot use its database or its files now"
        if isinstance(error, DamagedError):
            message = f"{message}; {error.next_step}"
        return scrubbed(message, self.folders)


def takes_tensors(entry: DeployedModel) -> bool:
    """Return whether requests to a model have inputs."""
    return entry.version.language is None


def takes_prompts(entry: DeployedModel) -> bool:
    """Return whether a model is a language model."""
    return entry.version.language is not None


def answering(entry: DeployedModel) -> LeasedDeployment:
    """Return the version that answers; Unavailable if none does."""
    if entry.loaded is None:
        reason = f": {entry.reason}" if entry.reason else ""
        raise Unavailable(
            f"model '{entry.version.model}' is {entry.state}{reason}",
            "GET /models/NAME shows its state",
            SOON_S if entry.state == "loading" else LATER_S,
        )
    return entry.loaded


def only(names: Sequence[str]) -> str:
    """The model of a request without a name: the only one that is deployed."""
    if not names:
        raise NotFound("no model is deployed", "PUT /models/NAME/deployment loads one")
    if len(names) > 1:
        raise Unprocessable(
            f"several models are deployed: {', '.join(names)}", "name one of them in the request"
        )
    return names[0]
