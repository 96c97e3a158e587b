"""Limits for everybody; keys and the audit for administrators."""

import re
from pathlib import Path

from tests.service.builders.app import Desk, at_desk
from tests.service.pages.test_pages import csrf_of, signed_in


def test_everybody_sees_the_own_limits_and_only_an_administrator_the_rest(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await signed_in(desk, "compile")
        limits = await desk.client.get("/ui/limits")
        assert "max_queued" in limits.text
        assert "Administration" not in limits.text
        refused = await desk.client.get("/ui/admin")
        assert refused.status_code == 403
        token = csrf_of(limits.text)
        data = {"csrf": token, "name": "x", "scope": "admin"}
        assert (await desk.client.post("/ui/admin/keys", data=data)).status_code == 403
        assert len(desk.service.keys.list()) == 1

    at_desk(tmp_path, story, keys_required=True)


def test_an_administrator_makes_and_revokes_keys(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await signed_in(desk, "admin")
        page = (await desk.client.get("/ui/admin")).text
        assert "session.begun" in page
        assert "off" in page, "the sandbox of the test"
        token = csrf_of(page)
        for data in ({"name": "", "scope": "infer"}, {"name": "x"}, {"name": "x", "scope": "no"}):
            refused = await desk.client.post("/ui/admin/keys", data={"csrf": token, **data})
            assert refused.status_code == 422
            assert 'role="alert"' in refused.text
        data = {"csrf": token, "name": "<b>ann</b>", "scope": "infer"}
        made = await desk.client.post("/ui/admin/keys", data=data)
        found = re.search(r"cru_([0-9a-f]{10})_[\w-]+", made.text)
        assert found
        assert "&lt;b&gt;ann" in made.text
        assert found[0] not in (await desk.client.get("/ui/admin")).text
        headers = {"Authorization": f"Bearer {found[0]}"}
        assert (await desk.client.get("/models", headers=headers)).status_code == 200
        path = f"/ui/admin/keys/{found[1]}/revoke"
        assert (await desk.client.post(path)).status_code == 403, "without the token"
        assert (await desk.client.post(path, data={"csrf": token})).status_code == 303
        assert (await desk.client.get("/models", headers=headers)).status_code == 401
        assert (await desk.client.post(path, data={"csrf": token})).status_code == 404
        audit = (await desk.client.get("/ui/admin", params={"action": "key.revoked"})).text
        assert f"key/{found[1]}" in audit
        assert "<td>session.begun" not in audit

    at_desk(tmp_path, story, keys_required=True)
