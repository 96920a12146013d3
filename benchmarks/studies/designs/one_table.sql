-- A claim and a settlement both update the row in place, and ended jobs stay where they are.

CREATE TABLE {ns}_rows (LIKE {ns}_kept INCLUDING DEFAULTS, PRIMARY KEY (id)) WITH ({hot});
ALTER TABLE {ns}_rows ALTER state SET DEFAULT 'ready', ALTER ended_at DROP NOT NULL;
CREATE INDEX {ns}_rows_expiring ON {ns}_rows (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX {ns}_rows_dead ON {ns}_rows (id) WHERE state = 'failed';

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
        SELECT j.id, j.queue, m.*, CASE WHEN m."to" <> 'failed' THEN {ns}_slot(j.retention, now_us) END AS slot
        FROM json_to_recordset(p_moves) AS m (job_id uuid, at_version int, "to" text, why text, attempts int, failed int,
             delay bigint, outcome text)
        CROSS JOIN LATERAL (
            SELECT r.id, r.queue, r.retention FROM {ns}_rows r
            WHERE r.id = m.job_id AND r.state IS NOT DISTINCT FROM 'in_flight' AND r.version = m.at_version
              AND r.session_id IS NOT DISTINCT FROM p_session AND (m."to" = 'succeeded' OR NOT r.cancel_asked)
            OFFSET 0 FOR UPDATE) j
    ), changed AS (
        UPDATE {ns}_rows r
        SET state = x."to", reason = x.why, attempt = x.attempts, failures = x.failed,
            run_at = CASE WHEN x."to" = 'ready' THEN now_us + x.delay ELSE r.run_at END,
            ended_at = CASE WHEN x."to" <> 'ready' THEN now_us END,
            expires_at = CASE WHEN x."to" NOT IN ('ready', 'failed') THEN now_us + r.retention END,
            result = decode(x.outcome, 'base64')
        FROM x WHERE r.id = x.id
    ), counted AS (
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, x."to", count(*) FROM x WHERE x."to" <> 'ready' GROUP BY x.slot, x.queue, x."to"
    )
    SELECT count(*) INTO settled FROM x;
    RETURN settled;
END $$;
