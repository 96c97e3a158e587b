-- A database of schema version 5, dumped by sqlite3's iterdump: Crucible wrote it before it used Alembic.
PRAGMA user_version = 5;
BEGIN TRANSACTION;
CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, action TEXT NOT NULL,
        object TEXT NOT NULL, key TEXT NOT NULL, owner TEXT NOT NULL, address TEXT NOT NULL,
        request TEXT NOT NULL, details TEXT NOT NULL,
        CHECK (action != 'audit.expired' OR object < at)
    ) STRICT;
INSERT INTO "audit" VALUES(1,'2026-11-26T18:33:10.358+00:00','key.created','key/0123456789','','service','','','{"name": "ci", "owner": "me", "scopes": "compile infer"}');
INSERT INTO "audit" VALUES(2,'2026-11-26T18:33:10.359+00:00','key.created','key/abcdefabcd','','service','','','{"name": "old", "owner": "key:abcdefabcd", "scopes": "infer"}');
INSERT INTO "audit" VALUES(3,'2026-11-26T18:33:10.359+00:00','key.revoked','key/abcdefabcd','','service','','','{}');
INSERT INTO "audit" VALUES(4,'2026-11-26T18:33:10.360+00:00','session.begun','key/0123456789','0123456789','me','10.0.0.1','r1','{}');
INSERT INTO "audit" VALUES(5,'2026-11-26T18:33:10.361+00:00','job.submitted','job/0001','','me','','','{"name": "n"}');
INSERT INTO "audit" VALUES(6,'2026-11-26T18:33:10.365+00:00','job.removed','job/0005','','service','','','{"owner": "me"}');
INSERT INTO "audit" VALUES(7,'2026-11-26T18:33:10.720+00:00','model.deployed','model/m','','me','','','{}');
CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT;
INSERT INTO "events" VALUES(1,'0001','2026-01-02T03:04:05.000+00:00','queued','{}');
INSERT INTO "events" VALUES(2,'0001','2026-01-02T03:04:06.000+00:00','running','{"attempt": 1}');
INSERT INTO "events" VALUES(3,'0001','2026-01-02T03:04:07.000+00:00','stage','{"stage": "build", "subject": "fp32", "fraction": null, "text": "", "elapsed_s": 0.0, "estimate_s": null, "state": "started", "seconds": 0.0}');
INSERT INTO "events" VALUES(4,'0001','2026-01-02T03:04:08.000+00:00','stage','{"stage": "build", "subject": "a\u0000b", "fraction": null, "text": "", "elapsed_s": 0.0, "estimate_s": null, "state": "started", "seconds": 0.0}');
INSERT INTO "events" VALUES(5,'0001','2026-01-02T03:04:09.000+00:00','stage','{"stage": "build", "subject": "fp32", "fraction": null, "text": "", "elapsed_s": 0.0, "estimate_s": null, "state": "finished", "seconds": 1.5}');
INSERT INTO "events" VALUES(6,'0002','2026-01-02T03:04:05.000+00:00','queued','{}');
INSERT INTO "events" VALUES(7,'0002','2026-01-02T03:04:10.000+00:00','running','{"attempt": 1}');
INSERT INTO "events" VALUES(8,'0002','2026-01-02T03:04:11.000+00:00','failed','{"code": "job.memory", "message": "too much", "next_step": "less"}');
INSERT INTO "events" VALUES(9,'0003','2026-01-02T03:04:05.000+00:00','queued','{}');
INSERT INTO "events" VALUES(10,'0004','2026-01-02T03:04:05.000+00:00','queued','{}');
INSERT INTO "events" VALUES(11,'0004','2026-01-02T03:04:12.000+00:00','running','{"attempt": 1}');
INSERT INTO "events" VALUES(12,'0004','2026-01-02T03:04:13.000+00:00','succeeded','{"verdict": "accepted", "winner": "w"}');
CREATE TABLE jobs (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, identity TEXT NOT NULL, state TEXT NOT NULL,
        created TEXT NOT NULL, job TEXT NOT NULL
    ) STRICT;
INSERT INTO "jobs" VALUES('0001','me','i1','running','2026-01-02T03:04:05.000+00:00','{"id":"0001","owner":"me","identity":"i1","name":"n","device":"cpu","measures":null,"recompiles":null,"state":"running","created":"2026-01-02T03:04:05.000+00:00","started":"2026-01-02T03:04:06.000+00:00","finished":null,"attempt":1,"interruptions":0,"estimate_s":null,"progress":{"stage":"build","subject":"fp32","fraction":null,"text":"","elapsed_s":0.0,"estimate_s":null},"verdict":null,"winner":null,"engine":null,"failure":null,"pid":42,"pid_started":1.0,"sandbox":[],"trace":null}');
INSERT INTO "jobs" VALUES('0002','you','i2','failed','2026-01-02T03:04:05.000+00:00','{"id":"0002","owner":"you","identity":"i2","name":"n","device":"gpu:0","measures":null,"recompiles":null,"state":"failed","created":"2026-01-02T03:04:05.000+00:00","started":"2026-01-02T03:04:10.000+00:00","finished":"2026-01-02T03:04:11.000+00:00","attempt":1,"interruptions":0,"estimate_s":null,"progress":null,"verdict":null,"winner":null,"engine":null,"failure":{"code":"job.memory","message":"too much","next_step":"less"},"pid":null,"pid_started":null,"sandbox":[],"trace":null}');
INSERT INTO "jobs" VALUES('0003','me','i3','queued','2026-01-02T03:04:05.000+00:00','{');
INSERT INTO "jobs" VALUES('0004','me','i4','succeeded','2026-01-02T03:04:05.000+00:00','{"id":"0004","owner":"me","identity":"i4","name":"n","device":"cpu","measures":null,"recompiles":null,"state":"succeeded","created":"2026-01-02T03:04:05.000+00:00","started":"2026-01-02T03:04:12.000+00:00","finished":"2026-01-02T03:04:13.000+00:00","attempt":1,"interruptions":0,"estimate_s":null,"progress":null,"verdict":"accepted","winner":"w","engine":null,"failure":null,"pid":null,"pid_started":null,"sandbox":[],"trace":null}');
CREATE TABLE keys (
        prefix TEXT PRIMARY KEY, sha256 TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL,
        scopes TEXT NOT NULL, created TEXT NOT NULL, revoked TEXT
    ) STRICT;
INSERT INTO "keys" VALUES('0123456789','8b0a6c9f961e8dfe18e39ef78947ddd29fdcfa1f88581d4f581cd13491e81fbb','ci','me','compile infer','2026-11-26T18:33:10+00:00',NULL);
INSERT INTO "keys" VALUES('abcdefabcd','addfc0952d387d65289391b57dc5d9007dd15a3d7f4256358a4c4c86accd04ec','old','key:abcdefabcd','infer','2026-11-26T18:33:10+00:00','2026-11-26T18:33:10+00:00');
CREATE TABLE models (
        name TEXT PRIMARY KEY, owner TEXT NOT NULL, current INTEGER NOT NULL,
        latest INTEGER NOT NULL, deployed INTEGER NOT NULL DEFAULT 0, deployment TEXT
    ) STRICT;
INSERT INTO "models" VALUES('m','me',2,2,1,'{"version":null,"device":null,"instances":2,"max_batch":null,"max_delay_s":0.002,"queue_limit":256,"timeout_s":30.0}');
CREATE TABLE requests (
        owner TEXT NOT NULL, idempotency_key TEXT NOT NULL, digest TEXT NOT NULL,
        job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        created TEXT NOT NULL, PRIMARY KEY (owner, idempotency_key)
    ) STRICT;
INSERT INTO "requests" VALUES('me','key-1','digest','0001','2026-01-02T03:04:05.000+00:00');
CREATE TABLE sessions (
        sha256 TEXT PRIMARY KEY, key TEXT NOT NULL REFERENCES keys (prefix), expires TEXT NOT NULL
    ) STRICT;
INSERT INTO "sessions" VALUES('ddf9356c2343cc046c11e8d98b67ca89e62904c9308cbbf66481d37f7cabf5d0','0123456789','2126-01-01T12:00:00+00:00');
CREATE TABLE versions (
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE, version INTEGER NOT NULL,
        job_id TEXT NOT NULL, before INTEGER, about TEXT NOT NULL, memory_bytes INTEGER, PRIMARY KEY (model, version)
    ) STRICT;
INSERT INTO "versions" VALUES('m',1,'job of 1',NULL,'{"model":"m","version":1,"owner":"me","job":"job of 1","created":"2026-01-01T00:00:00.000+00:00","verdict":"accepted","override":false,"before":null,"label":"onnxruntime fp32","backend":"onnxruntime","precision":"fp32","target":"a CPU","on_gpu":false,"size_bytes":6,"peak_bytes":0,"memory_bytes":null,"inputs":[{"name":"x","dtype":"float32","shape":["batch",4],"location":"device","kind":"static"}],"outputs":[{"name":"x","dtype":"float32","shape":["batch",4],"location":"device","kind":"static"}],"profiles":[],"batch":{"axes":{"x":0,"y":0},"maximum":8,"padding":[],"packing":null,"packs":false,"proved":true,"reason":"","largest_error":0.0},"best_point":null,"image":null,"labels":{"x":["cat","dog"]}}',NULL);
INSERT INTO "versions" VALUES('m',2,'job of 1',1,'{"model":"m","version":2,"owner":"me","job":"job of 1","created":"2026-01-01T00:00:00.000+00:00","verdict":"accepted","override":false,"before":1,"label":"onnxruntime fp32","backend":"onnxruntime","precision":"fp32","target":"a CPU","on_gpu":false,"size_bytes":6,"peak_bytes":0,"memory_bytes":null,"inputs":[{"name":"x","dtype":"float32","shape":["batch",4],"location":"device","kind":"static"}],"outputs":[{"name":"x","dtype":"float32","shape":["batch",4],"location":"device","kind":"static"}],"profiles":[],"batch":{"axes":{"x":0,"y":0},"maximum":8,"padding":[],"packing":null,"packs":false,"proved":true,"reason":"","largest_error":0.0},"best_point":null,"image":null,"labels":{"x":["cat","dog"]}}',2147483648);
CREATE INDEX jobs_by_identity ON jobs (owner, identity);
CREATE INDEX jobs_by_state ON jobs (state, id);
CREATE INDEX events_by_job ON events (job_id, seq);
CREATE INDEX audit_by_action ON audit (action, object);
CREATE TRIGGER audit_replace BEFORE INSERT ON audit
        WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq)
        BEGIN SELECT RAISE(ABORT, 'an audit entry cannot be changed'); END;
CREATE TRIGGER audit_update BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, 'an audit entry cannot be changed'); END;
CREATE TRIGGER audit_delete BEFORE DELETE ON audit
        WHEN OLD.at >= coalesce(
            (SELECT max(object) FROM audit WHERE action = 'audit.expired'), ''
        )
        BEGIN SELECT RAISE(ABORT, 'an audit entry has not expired'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('audit',7);
INSERT INTO "sqlite_sequence" VALUES('events',14);
COMMIT;
