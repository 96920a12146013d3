-- A claim updates the row in place, a settlement moves it to the history of the store.

CREATE TABLE {ns}_rows (
    LIKE {ns}_in_flight INCLUDING DEFAULTS,
    state text NOT NULL DEFAULT 'ready',
    PRIMARY KEY (id)
) WITH ({hot});

CREATE FUNCTION {ns}_put(p_jobs json, p_first uuid, p_last uuid) RETURNS int {settings}
AS $$
DECLARE
    now_us bigint := {ns}_now(); made int;
BEGIN
    INSERT INTO {ns}_rows (id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at, run_at)
    SELECT n.id, n.task, decode(n.payload, 'base64'), n.task_version, n.queue, n.share, n.priority, n.max_retries,
           n.retention, now_us, now_us
    FROM json_to_recordset(p_jobs) AS n (id uuid, task text, payload text, task_version text, queue text, share text,
         priority smallint, max_retries int, retention bigint)
    ON CONFLICT (id) DO NOTHING;
    GET DIAGNOSTICS made = ROW_COUNT;
    IF {ns}_among_ended(p_first, p_last, now_us) THEN RAISE EXCEPTION 'an id was there before'; END IF;
    RETURN made;
END $$;

CREATE FUNCTION {ns}_end(p_session text, p_moves json) RETURNS int {settings}
AS $$
DECLARE
    now_us bigint := {ns}_now(); settled int;
BEGIN
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF NOT FOUND THEN RAISE EXCEPTION 'the session is not open'; END IF;
    WITH x AS MATERIALIZED (
        SELECT j.*, m.*, CASE WHEN m."to" <> 'failed' THEN {ns}_slot(j.retention, now_us) END AS slot
        FROM json_to_recordset(p_moves) AS m (job_id uuid, at_version int, "to" text, why text, attempts int, failed int,
             delay bigint, outcome text)
        CROSS JOIN LATERAL (
            SELECT * FROM {ns}_rows r
            WHERE r.id = m.job_id AND r.state IS NOT DISTINCT FROM 'in_flight' AND r.version = m.at_version
              AND r.session_id IS NOT DISTINCT FROM p_session AND (m."to" = 'succeeded' OR NOT r.cancel_asked)
            OFFSET 0 FOR UPDATE) j
    ), gone AS (
        DELETE FROM {ns}_rows r WHERE r.id = ANY (ARRAY(SELECT x.id FROM x WHERE x."to" <> 'ready'))
    ), back AS (
        UPDATE {ns}_rows r
        SET state = 'ready', reason = x.why, attempt = x.attempts, failures = x.failed, run_at = now_us + x.delay
        FROM x WHERE r.id = x.id AND x."to" = 'ready'
    ), past AS (
        INSERT INTO {ns}_history ({identity}, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect,
                                  claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at, result, slot)
        SELECT {identity}, why, run_at, version, session_id, attempts, failed, crashes, snoozes, suspect, claimed_at,
               failure_history, progress, cancel_asked, "to", now_us, now_us + retention, decode(outcome, 'base64'), slot
        FROM x WHERE x."to" <> 'ready' AND x.slot IS NOT NULL
    ), kept AS (
        INSERT INTO {ns}_kept ({identity}, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect,
                               claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at, result)
        SELECT {identity}, why, run_at, version, session_id, attempts, failed, crashes, snoozes, suspect, claimed_at,
               failure_history, progress, cancel_asked, "to", now_us,
               CASE WHEN "to" <> 'failed' THEN now_us + retention END, decode(outcome, 'base64')
        FROM x WHERE x."to" <> 'ready' AND x.slot IS NULL
    ), counted AS (
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, x."to", count(*) FROM x WHERE x."to" <> 'ready' GROUP BY x.slot, x.queue, x."to"
    )
    SELECT count(*) INTO settled FROM x;
    RETURN settled;
END $$;
