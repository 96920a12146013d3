-- More of what nearly all jobs have in common is said once: the task and options of the jobs of a lane, when they are claimed; the
-- session, version and result of those that have succeeded. No table is touched: nobody waits for this migration.

-- As {ns}_claim_lane, which is for lanes with jobs of several kinds, and for processes of the version before. Here the caller says
-- what the last jobs that it claimed from the lane had in common, the values from `p_task` on. Only a job that differs in them, or
-- was claimed before, or has a key, tells of itself in `more`. The rows come in any order: the INSERT answers with them, so they
-- need not be kept and read once more.
CREATE FUNCTION {ns}_claim_alike(p_session text, p_queue text, p_priority smallint, p_share text, p_since bigint, p_gaps json,
                                 p_most int, p_task text, p_task_version text, p_max_retries int, p_retention bigint,
                                 p_correlation_id text)
RETURNS TABLE (id text, payload bytea, created_at bigint, run_at bigint, more text, now_us bigint, standing int)
LANGUAGE plpgsql ROWS 100
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    claimed int;
BEGIN
    now_us := {ns}_now();
    standing := 0;
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
    standing := 1;
    IF EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, priority smallint, from_share text, to_share text)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority = g.priority AND w.share >= g.from_share AND w.share < g.to_share LIMIT 1) x
    ) OR EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, after_priority smallint, before_priority smallint)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority > g.after_priority AND w.priority < g.before_priority LIMIT 1) x
    ) THEN RETURN NEXT; RETURN; END IF;
    standing := 3;
    RETURN QUERY
    WITH gone AS (
        DELETE FROM {ns}_waiting w WHERE w.ctid = ANY (ARRAY(
            SELECT x.ctid FROM {ns}_waiting x
            WHERE x.queue = p_queue AND x.priority = p_priority AND x.share = p_share
              AND x.run_at >= p_since AND x.run_at <= now_us
              AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = p_queue)
            ORDER BY x.run_at, x.id LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING w.*
    )
    INSERT INTO {ns}_in_flight AS f (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
        key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
        crashes, snoozes, suspect, claimed_at, failure_history)
    SELECT g.id, g.task, g.payload, g.task_version, g.queue, g.share, g.priority, g.max_retries, g.retention, g.key,
           g.key_hash, g.key_window, g.correlation_id, g.created_at, 'claimed', g.run_at, g.version + 1, p_session,
           g.attempt, g.failures, g.crashes, g.snoozes, g.suspect, now_us, g.failure_history
    FROM gone g
    RETURNING f.id::text, f.payload, f.created_at, f.run_at,
        CASE WHEN f.version > 1 OR f.key IS NOT NULL OR f.task <> p_task OR f.task_version <> p_task_version
                  OR f.max_retries <> p_max_retries OR f.retention <> p_retention
                  OR f.correlation_id IS DISTINCT FROM p_correlation_id THEN json_build_object(
            'task', f.task, 'task_version', f.task_version, 'max_retries', f.max_retries, 'retention', f.retention,
            'correlation_id', f.correlation_id, 'version', f.version - 1, 'attempt', f.attempt, 'failures', f.failures,
            'crashes', f.crashes, 'snoozes', f.snoozes, 'suspect', f.suspect,
            'failure_history', replace(encode(f.failure_history, 'base64'), E'\n', ''),
            'key', CASE WHEN f.key IS NOT NULL THEN json_build_object(
                'text', f.key, 'payload_hash', f.key_hash, 'window', f.key_window) END)::text END,
        NULL::bigint, NULL::int;
    GET DIAGNOSTICS claimed = ROW_COUNT;
    IF claimed < p_most THEN
        SELECT w.run_at INTO run_at FROM {ns}_waiting w
        WHERE w.queue = p_queue AND w.priority = p_priority AND w.share = p_share AND w.run_at > now_us
          AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = p_queue)
        ORDER BY w.run_at LIMIT 1;
    END IF;
    RETURN NEXT;
END $$;

-- Settle jobs of one open session that have succeeded at their first attempt, were claimed under one version, and have one result.
--
-- As {ns}_succeed, which is for the others, and for processes of the version before. Here the rows are deleted where the index finds
-- them. An index scan takes the elements of an array in the order of the index, whatever their own: so rows are locked in the order
-- of ids, as by everybody, without being locked and looked for before; and one that changed in place while we waited for it is not
-- missed. Nothing is joined to them, so they reach the indexes of the history in the order of ids, too.
CREATE FUNCTION {ns}_succeed_alike(p_session text, p_ids uuid[], p_version int, p_result bytea)
RETURNS TABLE (job_id text, state text, reason text, version int, session_id text, session_open bool, cancel_asked bool)
LANGUAGE plpgsql ROWS 1
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); settled uuid[] := '{}';
BEGIN
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF FOUND THEN
        WITH gone AS (
            DELETE FROM {ns}_in_flight f
            WHERE f.id = ANY (p_ids) AND f.version = p_version AND f.session_id IS NOT DISTINCT FROM p_session
            RETURNING f.*, {ns}_slot(f.retention, now_us) AS slot
        ), past AS (
            INSERT INTO {ns}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at,
                expires_at, result, slot)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention,
                   x.key, x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version,
                   x.session_id, 1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention, p_result, x.slot
            FROM gone x WHERE x.slot IS NOT NULL
        ), kept AS (
            INSERT INTO {ns}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
                key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
                crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at,
                expires_at, result)
            SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention,
                   x.key, x.key_hash, x.key_window, x.correlation_id, x.created_at, 'succeeded', x.run_at, x.version,
                   x.session_id, 1, 0, 0, 0, false, x.claimed_at, '', x.progress, x.cancel_asked, 'succeeded', now_us,
                   now_us + x.retention, p_result
            FROM gone x WHERE x.slot IS NULL
        ), counted AS (
            INSERT INTO {ns}_tallies (slot, queue, state, jobs)
            SELECT x.slot, x.queue, 'succeeded', count(*) FROM gone x GROUP BY x.slot, x.queue
        )
        SELECT coalesce(array_agg(x.id), '{}') INTO settled FROM gone x;
    END IF;
    IF cardinality(settled) < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT m.id::text, j.state, j.reason, j.version, j.session_id, coalesce(s.open, false), j.cancel_asked
        FROM unnest(p_ids) AS m (id)
        LEFT JOIN LATERAL {ns}_get(m.id) j ON true
        LEFT JOIN LATERAL (SELECT s.open FROM {ns}_sessions s WHERE s.id = j.session_id OFFSET 0) s ON true
        WHERE NOT m.id = ANY (settled);
    END IF;
END $$;
