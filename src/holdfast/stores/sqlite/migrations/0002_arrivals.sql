-- A table of arrivals: what an enqueue of a single job costs is the pages that it dirties, and a row at the end of a
-- table with a rowid and no index dirties one. In {ns}_live it is two, and three while they split.
-- Whoever writes anything else takes in what has arrived, first and in the same transaction, so that claims, limits
-- and order only know {ns}_live; whoever only reads looks here, too. Why: docs/decisions/0015.

CREATE TABLE {ns}_arrived (
    id              TEXT    NOT NULL,
    task            TEXT    NOT NULL,
    payload         BLOB    NOT NULL,
    task_version    TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    share           TEXT    NOT NULL,
    priority        INTEGER NOT NULL,
    max_retries     INTEGER NOT NULL,
    retention       INTEGER NOT NULL,
    correlation_id  TEXT,
    created_at      INTEGER NOT NULL,
    run_at          INTEGER NOT NULL
) STRICT;

-- The same as rows of {ns}_live: what a job without a key is when nothing has happened to it yet.
CREATE VIEW {ns}_arrivals AS
    SELECT id, task, payload, task_version, queue, share, priority, 'ready' AS state, 'enqueued' AS reason, run_at,
           created_at, 0 AS version, NULL AS session_id, 0 AS attempt, 0 AS failures, 0 AS crashes, 0 AS snoozes,
           0 AS suspect, 0 AS cancel_asked, max_retries, retention, NULL AS key, NULL AS key_hash, NULL AS key_window,
           correlation_id, NULL AS claimed_at, x'' AS failure_history, NULL AS progress
    FROM {ns}_arrived;

-- INSERT INTO {ns}_take_in VALUES ('all') takes in what has arrived, and does nothing if nothing has.
CREATE VIEW {ns}_take_in AS SELECT 'all' AS what WHERE 0;

CREATE TRIGGER {ns}_take_in_all INSTEAD OF INSERT ON {ns}_take_in WHEN EXISTS (SELECT 1 FROM {ns}_arrived) BEGIN
    -- An id that is there already was enqueued again, after a lost answer, by a process of a version before this table.
    INSERT INTO {ns}_live (
        id, task, payload, task_version, queue, share, priority, state, reason, run_at, created_at, version, attempt,
        failures, crashes, snoozes, suspect, cancel_asked, max_retries, retention, correlation_id, failure_history
    )
    SELECT id, task, payload, task_version, queue, share, priority, state, reason, run_at, created_at, version, attempt,
           failures, crashes, snoozes, suspect, cancel_asked, max_retries, retention, correlation_id, failure_history
    FROM {ns}_arrivals arrival
    WHERE NOT EXISTS (SELECT 1 FROM {ns}_ended WHERE id = arrival.id)
    ON CONFLICT (id) DO NOTHING;
    DELETE FROM {ns}_arrived;
END;

-- Never more than these, also if nobody else ever writes. The numbers begin at 1 again in a table that was emptied.
CREATE TRIGGER {ns}_arrived_enough AFTER INSERT ON {ns}_arrived WHEN NEW.rowid >= 128 BEGIN
    INSERT INTO {ns}_take_in VALUES ('all');
END;

-- A process of a version before this table claims from {ns}_live alone: no job keeps it waiting for longer than the
-- time between two heartbeats.
CREATE TRIGGER {ns}_arrived_beat AFTER UPDATE OF beat ON {ns}_sessions BEGIN
    INSERT INTO {ns}_take_in VALUES ('all');
END;

-- As before, with what has arrived.
DROP VIEW {ns}_ready;
CREATE VIEW {ns}_ready AS
    SELECT id, task, payload, task_version, queue, share, priority, run_at, max_retries, retention, correlation_id,
           created_at, attempt, failures, reason
    FROM {ns}_live WHERE state = 'ready'
    UNION ALL
    SELECT id, task, payload, task_version, queue, share, priority, run_at, max_retries, retention, correlation_id,
           created_at, attempt, failures, reason
    FROM {ns}_arrivals;

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
    INSERT INTO {ns}_take_in VALUES ('all');
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
