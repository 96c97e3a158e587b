"""The list of all attacks, in the order in which they run."""

from __future__ import annotations

from tests.attack import (
    bodies,
    graphs,
    heads,
    host_faults,
    loads,
    plans,
    rpc,
    sandbox,
    tenants,
    uploads,
)
from tests.attack.record import Attack

ATTACKS = (
    # uploads
    Attack("code-in-pickles", "422; no code runs", uploads.code_in_pickles),
    Attack(
        "code-without-permission", "422; no code runs", sandbox.code_without_permission, slow=True
    ),
    Attack(
        "code-in-weights",
        "allowed code reaches nothing outside its job",
        sandbox.code_in_weights,
        slow=True,
    ),
    Attack(
        "code-in-sample-inputs",
        "allowed code reaches nothing outside its job",
        sandbox.code_in_inputs,
        slow=True,
    ),
    Attack("no-model", "422 at once, and no job", uploads.no_model),
    Attack("file-names", "files are named by the server", uploads.file_names),
    Attack("archive-bombs", "413 or 422, and nothing is left", uploads.archive_bombs),
    Attack("archive-links", "422, and nothing is written outside", uploads.archive_links),
    Attack(
        "archive-members", "413 or 422, and nothing is left", uploads.archive_members, slow=True
    ),
    # graphs
    Attack(
        "external-data", "no other file is read; the jobs fail", graphs.external_data, slow=True
    ),
    Attack("external-link", "422", graphs.external_link),
    Attack("endless-loop", "a named limit ends the job", graphs.endless_loop, slow=True),
    Attack("huge-tensors", "the jobs fail, the next one succeeds", graphs.huge_tensors, slow=True),
    Attack("nested-graph", "the job fails, the next one succeeds", graphs.nested_graph, slow=True),
    # plans and paths
    Attack("host-paths", "422", plans.host_paths),
    Attack("code-hooks", "422; no code runs", plans.code_hooks),
    Attack("yaml-plans", "413 or 422; no code runs", plans.yaml_plans),
    Attack("addresses", "the server calls nobody", plans.addresses),
    Attack("url-paths", "4xx, and no file is shown", plans.url_paths),
    Attack("model-names", "4xx, and no folder outside is made", plans.model_names),
    # inference
    Attack("npy", "4xx; no code runs, no memory is taken", bodies.npy),
    Attack("oip-binary", "4xx", bodies.oip_binary),
    Attack("json-texts", "4xx", bodies.json_texts),
    Attack("compressed-bodies", "4xx, before 1 GB is unpacked", bodies.compressed),
    # HTTP
    Attack("smuggling", "400, and no second request is read", heads.smuggling),
    Attack("two-hosts", "400", heads.two_hosts),
    Attack("foreign-host", "421 and 403", heads.foreign_host),
    Attack("large-heads", "400 or 431", heads.large_heads),
    Attack("slow-heads", "others are answered; 408 after 30 s", heads.slow_heads, slow=True),
    Attack("expect-100", "refused before the body; no memory for it", heads.expect_continue),
    Attack(
        "dribbling-bodies",
        "/healthz takes less than 50 ms in the median",
        loads.dribbling_bodies,
        slow=True,
    ),
    Attack("stalled-bodies", "refused within 45 s", loads.stalled_body, slow=True),
    Attack("endless-chunks", "413 at the limit", loads.endless_chunks),
    Attack("unfinished-bodies", "the memory has a limit", loads.unfinished_bodies, slow=True),
    Attack("many-connections", "another address is answered", loads.many_connections, slow=True),
    # gRPC
    Attack("giant-messages", "RESOURCE_EXHAUSTED", rpc.giant_message),
    Attack("malformed-messages", "no INTERNAL or UNKNOWN", rpc.malformed_messages),
    Attack("many-streams", "others are answered", rpc.many_streams),
    # keys and tenants
    Attack("forged-keys", "4xx", tenants.forged_keys),
    Attack("guessed-keys", "429 soon; the owner is answered", tenants.guessed_keys),
    Attack("revoked-key", "401 at once, over HTTP and gRPC", tenants.revoked_key),
    Attack("other-tenant", "403 or 404, and nothing changes", tenants.other_tenant),
    Attack("lists", "nothing of another tenant is shown", tenants.lists),
    Attack("secrets", "no key, environment or path is shown", tenants.secrets),
    # faults and floods
    Attack("full-disk", "507; later jobs succeed", host_faults.full_disk),
    Attack("kill-9", "no accepted job is lost", host_faults.kill_9, slow=True),
    Attack(
        "flood-of-jobs",
        "another tenant waits for one job at most",
        host_faults.flood_of_jobs,
        slow=True,
    ),
)
