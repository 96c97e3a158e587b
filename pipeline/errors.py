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
    │   │   └── ObjectStoreError                    S3 refuses
    │   │       └── StoreAway                       it does not answer now
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
    """The request cannot work as it is written.

    Next: do what the message says.
    """

    code = "user"
    exit_code = 1


class PlanError(UserError):
    """The plan, the command line or a setting cannot be used as it is.

    Next: correct the key or the option that the message names.
    """

    code = "plan.invalid"


class ModelError(UserError):
    """The model file cannot be used: the file, its inputs and outputs, or its operators.

    Next: correct the model, or export it again.
    """

    code = "model.invalid"


class DataError(UserError):
    """Samples cannot be used: calibration, selection or validation data, or the tensors of a
    request.

    Next: correct names, dtypes, shapes or values as the message says.
    """

    code = "data.invalid"


class UnsupportedError(UserError):
    """The backend lacks a precision, or cannot run a node of the model.

    Next: choose another precision or backend, or replace the operator by surgery.
    """

    code = "backend.unsupported"


class HostError(CrucibleError):
    """This machine cannot do it.

    Next: do what the message says, or use another machine.
    """

    code = "host"
    exit_code = 1


class BackendUnavailable(HostError):
    """A library or a device is missing on this host.

    Next: install the extra that the message names; `crucible doctor` shows what this host has.
    """

    code = "backend.unavailable"


class DiskFull(HostError):
    """The disk is full, or nearly so.

    Next: free space on the disk that the message names; `crucible gc` removes old results.
    """

    code = "host.disk_full"
    may_pass = True


class ChildDied(HostError):
    """A child process ended by a signal or out of time.

    Next: read the log that the message names; limit the memory or raise `stage_timeout_s` if
    that is the cause.
    """

    code = "host.child_died"


class ChildKilled(ChildDied):
    may_pass = True


class ChildStopped(ChildDied):
    may_pass = True


class LoadCrashed(ChildDied):
    pass


class StoreError(HostError):
    """The store, or a folder of results, cannot be used.

    Next: check its owner, its rights and its disk.
    """

    code = "host.store"


class ObjectStoreError(StoreError):
    pass


class StoreAway(ObjectStoreError):
    pass


class DamagedError(HostError):
    """A file that Crucible wrote has changed since, or is missing.

    Next: make it again as the message says: compile, or promote the version's job again.
    """

    code = "host.damaged"


class InternalError(CrucibleError):
    """A bug in Crucible.

    Next: report it with the log that the message names.
    """

    code = "internal"
    exit_code = 3
