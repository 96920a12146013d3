-- The first schema. `{ns}` is the namespace, "holdfast" unless the URL says otherwise.

-- Every job that has not ended. A ready job and the same job in flight are one row: claiming it rewrites the row in
-- place and takes it out of the partial index, which on SQLite costs half of moving it between two tables.
-- Clustered by id: ids are UUIDv7, so rows arrive at the right edge of the tree, and there is no second tree to write.
CREATE TABLE {ns}_live (
    id              TEXT    NOT NULL PRIMARY KEY,
    task            TEXT    NOT NULL,
    payload         BLOB    NOT NULL,
    task_version    TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    share           TEXT    NOT NULL,
    priority        INTEGER NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN ('ready', 'in_flight')),
    reason          TEXT    NOT NULL,
    run_at          INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    version         INTEGER NOT NULL,
    session_id      TEXT,
    attempt         INTEGER NOT NULL,
    failures        INTEGER NOT NULL,
    crashes         INTEGER NOT NULL,
    snoozes         INTEGER NOT NULL,
    suspect         INTEGER NOT NULL,
    cancel_asked    INTEGER NOT NULL,
    max_retries     INTEGER NOT NULL,
    retention       INTEGER NOT NULL,
    key             TEXT,
    key_hash        TEXT,
    key_window      INTEGER,
    correlation_id  TEXT,
    claimed_at      INTEGER,
    failure_history BLOB    NOT NULL,
    progress        BLOB
) WITHOUT ROWID, STRICT;
-- The lanes, each in the order in which it is served: by due time, then by id, which SQLite appends to every index.
CREATE INDEX {ns}_lanes ON {ns}_live (queue, priority, share, run_at) WHERE state = 'ready';
CREATE INDEX {ns}_held ON {ns}_live (session_id) WHERE state = 'in_flight';

-- Jobs that have ended. Ids are UUIDv7, so rows arrive nearly in key order and the tree is written at its right edge.
CREATE TABLE {ns}_ended (
    id              TEXT    NOT NULL PRIMARY KEY,
    task            TEXT    NOT NULL,
    payload         BLOB    NOT NULL,
    task_version    TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    share           TEXT    NOT NULL,
    priority        INTEGER NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN ('succeeded', 'failed', 'cancelled')),
    reason          TEXT    NOT NULL,
    run_at          INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    version         INTEGER NOT NULL,
    session_id      TEXT,
    attempt         INTEGER NOT NULL,
    failures        INTEGER NOT NULL,
    crashes         INTEGER NOT NULL,
    snoozes         INTEGER NOT NULL,
    suspect         INTEGER NOT NULL,
    cancel_asked    INTEGER NOT NULL,
    max_retries     INTEGER NOT NULL,
    retention       INTEGER NOT NULL,
    key             TEXT,
    key_hash        TEXT,
    key_window      INTEGER,
    correlation_id  TEXT,
    claimed_at      INTEGER,
    failure_history BLOB    NOT NULL,
    progress        BLOB,
    ended_at        INTEGER NOT NULL,
    expires_at      INTEGER,             -- null: a dead letter, kept until somebody replays or forgets it
    result          BLOB
) WITHOUT ROWID, STRICT;
CREATE INDEX {ns}_expiring ON {ns}_ended (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX {ns}_dead ON {ns}_ended (id) WHERE state = 'failed';

-- How many ended jobs there are per queue and state, so that nobody has to count them.
CREATE TABLE {ns}_totals (
    queue TEXT NOT NULL, state TEXT NOT NULL, jobs INTEGER NOT NULL, PRIMARY KEY (queue, state)
) WITHOUT ROWID, STRICT;

CREATE TABLE {ns}_keys (
    queue      TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    key_hash   TEXT    NOT NULL,
    job_id     TEXT    NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID, STRICT;
CREATE INDEX {ns}_keys_expiring ON {ns}_keys (expires_at);

CREATE TABLE {ns}_sessions (
    id        TEXT    NOT NULL PRIMARY KEY,
    beat      INTEGER NOT NULL,
    open      INTEGER NOT NULL,
    opened_at INTEGER NOT NULL,
    beat_at   INTEGER NOT NULL,
    host      TEXT    NOT NULL,
    pid       INTEGER NOT NULL,
    queues    TEXT    NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE {ns}_paused (queue TEXT NOT NULL PRIMARY KEY) WITHOUT ROWID, STRICT;

CREATE TABLE {ns}_checkpoints (
    queue TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (queue, name)
) WITHOUT ROWID, STRICT;

-- For people and for plain SQL: the jobs that wait. INSERT INTO {ns}_ready (task, payload) is a valid enqueue.
CREATE VIEW {ns}_ready AS
    SELECT id, task, payload, task_version, queue, share, priority, run_at, max_retries, retention, correlation_id,
           created_at, attempt, failures, reason
    FROM {ns}_live WHERE state = 'ready';

CREATE TRIGGER {ns}_ready_insert INSTEAD OF INSERT ON {ns}_ready BEGIN
    SELECT RAISE(ABORT, 'holdfast: task and queue must be 1 to 128 letters, digits, "_", "." or "-"')
    WHERE coalesce(NEW.queue, 'default') GLOB '*[^A-Za-z0-9_.-]*' OR coalesce(NEW.queue, 'default') GLOB '[.-]*'
       OR length(NEW.queue) NOT BETWEEN 1 AND 128
       OR NEW.task GLOB '*[^A-Za-z0-9_.-]*' OR NEW.task GLOB '[.-]*' OR length(NEW.task) NOT BETWEEN 1 AND 128;
    SELECT RAISE(ABORT, 'holdfast: priority must be a whole number from -100 to 100')
    WHERE CAST(NEW.priority AS TEXT) <> CAST(CAST(NEW.priority AS INTEGER) AS TEXT)
       OR CAST(NEW.priority AS INTEGER) NOT BETWEEN -100 AND 100;
    SELECT RAISE(ABORT, 'holdfast: max_retries must be a whole number from 0 to 1000')
    WHERE CAST(NEW.max_retries AS TEXT) <> CAST(CAST(NEW.max_retries AS INTEGER) AS TEXT)
       OR CAST(NEW.max_retries AS INTEGER) NOT BETWEEN 0 AND 1000;
    SELECT RAISE(ABORT, 'holdfast: run_at must be microseconds since 1970-01-01 UTC, up to the year 2255')
    WHERE CAST(NEW.run_at AS TEXT) <> CAST(CAST(NEW.run_at AS INTEGER) AS TEXT)
       OR CAST(NEW.run_at AS INTEGER) NOT BETWEEN 0 AND 9007199254740991;
    SELECT RAISE(ABORT, 'holdfast: retention must be whole microseconds, up to ten years')
    WHERE CAST(NEW.retention AS TEXT) <> CAST(CAST(NEW.retention AS INTEGER) AS TEXT)
       OR CAST(NEW.retention AS INTEGER) NOT BETWEEN 0 AND 316224000000000;
    SELECT RAISE(ABORT, 'holdfast: payload must be a JSON object of named arguments, at most 262144 bytes')
    WHERE NOT json_valid(CAST(NEW.payload AS TEXT)) OR json_type(CAST(NEW.payload AS TEXT)) <> 'object'
       OR length(CAST(NEW.payload AS BLOB)) > 262144;
    SELECT RAISE(ABORT, 'holdfast: a job with this id was there before') FROM {ns}_ended WHERE id = NEW.id;
    INSERT INTO {ns}_live (
        id, task, payload, task_version, queue, share, priority, state, reason, run_at, created_at, version, attempt,
        failures, crashes, snoozes, suspect, cancel_asked, max_retries, retention, correlation_id, failure_history
    )
    SELECT
        -- A UUIDv7 from the clock and random bits, as clients make them.
        coalesce(NEW.id, lower(
            printf('%08x-%04x-7', now / 65536000, now / 1000 % 65536) || substr(hex(randomblob(2)), 2)
            || '-' || substr('89AB', 1 + abs(random() % 4), 1) || substr(hex(randomblob(2)), 2)
            || '-' || hex(randomblob(6))
        )),
        NEW.task,
        CAST(NEW.payload AS BLOB),
        coalesce(NEW.task_version, '1'),
        coalesce(NEW.queue, 'default'),
        coalesce(NEW.share, ''),
        coalesce(CAST(NEW.priority AS INTEGER), 5),
        'ready',
        'enqueued',
        -- This clock only has milliseconds. A job due within the present one goes behind those that were there first.
        max(coalesce(CAST(NEW.run_at AS INTEGER), now), now, 1 + coalesce((
            SELECT run_at FROM {ns}_live
            WHERE state = 'ready' AND queue = coalesce(NEW.queue, 'default') AND priority = coalesce(CAST(NEW.priority AS INTEGER), 5)
              AND share = coalesce(NEW.share, '') AND run_at < now + 1000
              AND coalesce(CAST(NEW.run_at AS INTEGER), now) < now + 1000
            ORDER BY run_at DESC LIMIT 1
        ), 0)),
        now,
        0, 0, 0, 0, 0, 0, 0,
        coalesce(NEW.max_retries, 3),
        coalesce(NEW.retention, 604800000000),
        NEW.correlation_id,
        x''
    FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 AS now);
END;
