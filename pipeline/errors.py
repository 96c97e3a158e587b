"""The exception tree. A message gives the expected value, the actual value and the next step.

    CrucibleError
    ├── UserError              the request cannot work as written              exit code 1
    │   ├── PlanError          plan.invalid         the plan or the command line
    │   ├── ModelError         model.invalid        the model file, its interface, its operators
    │   ├── DataError          data.invalid         calibration, selection or validation data
    │   └── UnsupportedError   backend.unsupported  a precision or node the backend lacks
    ├── HostError              this machine cannot do it                       exit code 1
    │   ├── BackendUnavailable backend.unavailable  a library or device is missing
    │   ├── DiskFull           host.disk_full
    │   ├── ChildDied          host.child_died      a child process ended by a signal, or
    │   │                                           out of time
    │   │   ├── ChildKilled                         it was killed, or ran out of memory
    │   │   ├── ChildStopped                        Crucible stopped it, because the run ends
    │   │   └── LoadCrashed                         it died as it loaded an engine that was just
    │   │                                           built
    │   ├── StoreError         host.store           the store cannot be used
    │   └── DamagedError       host.damaged         a file that Crucible wrote has changed since
    └── InternalError          our bug                                         exit code 3

An engine that is slow or wrong is not an exception: it is a verdict in the report (exit code 2).
"""

from __future__ import annotations

from typing import Self


class CrucibleError(Exception):
    """Base of all errors that Crucible raises on purpose.

    `code` is stable. `next_step` is a sentence that a user can act on.
    """

    code = "internal"
    exit_code = 3
    # whether the same request may succeed later, if only the load of this host changes
    may_pass = False

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:  # for pickle
        return (type(self), (self.message, self.next_step))

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.next_step}" if self.next_step else self.message


class UserError(CrucibleError):
    code = "user"
    exit_code = 1


class PlanError(UserError):
    code = "plan.invalid"


class ModelError(UserError):
    code = "model.invalid"


class DataError(UserError):
    code = "data.invalid"


class UnsupportedError(UserError):
    code = "backend.unsupported"


class HostError(CrucibleError):
    code = "host"
    exit_code = 1


class BackendUnavailable(HostError):
    code = "backend.unavailable"


class DiskFull(HostError):
    code = "host.disk_full"
    may_pass = True


class ChildDied(HostError):
    code = "host.child_died"


class ChildKilled(ChildDied):
    may_pass = True


class ChildStopped(ChildDied):
    pass


class LoadCrashed(ChildDied):
    pass


class StoreError(HostError):
    code = "host.store"


class DamagedError(HostError):
    code = "host.damaged"


class InternalError(CrucibleError):
    code = "internal"
    exit_code = 3
