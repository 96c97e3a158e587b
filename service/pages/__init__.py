"""Web pages for people, rendered on the server: the same service that programs reach over HTTP."""

from service.pages import (
    admin,
    compare,
    history,
    jobs,
    models,
    new_compile,
    sign_in,
    static_files,
    try_model,
)
from service.pages.language import try_language

PAGE_ROUTERS = (
    sign_in.router,
    static_files.router,
    jobs.router,
    new_compile.router,
    models.router,
    history.router,
    try_model.router,
    try_language.router,
    compare.router,
    admin.router,
)
