-- One job under an id that no call has named before, as {ns}_insert_fresh, which processes of the version before go on to use. What an
-- insert of one job costs the server is neither the row nor its indexes, but what is done around them: so there is one look instead of
-- three, no ON CONFLICT, one setting instead of four, and as few expressions as possible, since each is set up anew in each transaction.
-- No table is touched: nobody waits for this migration.

-- {ns}_insert_single inserts a job without key and limits, whose id no call had named at the time `p_since` by the store's clock (0: it
-- is not known). Answers with the store's time. If the id is there, it is refused with unique_violation or HF003, and nothing is
-- written: {ns}_insert tells what it means. `p_tell`: the queue to wake, or null.
--
-- Where the id may be by then, and why that is enough, is told in 0003_fresh.sql. The look is a statement of its own, so that it sees
-- what was committed before the insert had made sure that nobody else can insert the id; and it is one, so that all is seen at one time.
-- There is one for each pair of slots, that of ten minutes and that of days: each has a plan of its own that touches nothing else.
-- Which of the 80 it is, is found by halving. In the last second of ten minutes, everything is looked at.
--
-- Of the settings, the path is not needed as all is named with its schema; generic plans and no JIT are what single rows by their key get
-- anyway. That tables are not read from end to end has to be said: a plan may have been made when a table was empty.
DO $do$
DECLARE
    schema text := quote_ident(current_schema());
    look text := 'PERFORM FROM @{ns}_in_flight x WHERE x.id = p_id UNION ALL SELECT FROM @{ns}_kept x WHERE x.id = p_id '
        'UNION ALL SELECT FROM @{ns}_history_%s x WHERE x.id = p_id UNION ALL SELECT FROM @{ns}_history_%s x WHERE x.id = p_id;';
    -- Looks, and the numbers of the first pair of slots of each.
    looks text[] := ARRAY(SELECT format(look, n / 10, 8 + n % 10) FROM generate_series(0, 79) n ORDER BY n);
    firsts int[] := ARRAY(SELECT generate_series(0, 79));
    fewer text[];
    fewer_firsts int[];
BEGIN
    WHILE cardinality(looks) > 1 LOOP
        fewer := '{}';
        fewer_firsts := '{}';
        FOR i IN 1..cardinality(looks) BY 2 LOOP
            fewer := fewer || CASE WHEN i = cardinality(looks) THEN looks[i] ELSE
                format('IF slots < %s THEN %s ELSE %s END IF;', firsts[i + 1], looks[i], looks[i + 1]) END;
            fewer_firsts := fewer_firsts || firsts[i];
        END LOOP;
        looks := fewer;
        firsts := fewer_firsts;
    END LOOP;
    EXECUTE replace(replace($create$
CREATE FUNCTION @{ns}_insert_single(p_id uuid, p_payload bytea, p_task text, p_task_version text, p_queue text, p_share text,
                                    p_priority smallint, p_max_retries int, p_retention bigint, p_correlation_id text,
                                    p_delay bigint, p_run_at bigint, p_since bigint, p_tell text)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off
AS $body$
DECLARE
    now_us bigint := @{ns}_now(); slots bigint;
BEGIN
    INSERT INTO @{ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention, correlation_id,
                               created_at, run_at)
    VALUES (p_id, p_task, p_payload, p_task_version, p_queue, p_share, p_priority, p_max_retries, p_retention,
            p_correlation_id, now_us,
            CASE WHEN p_run_at IS NULL THEN now_us + p_delay ELSE greatest(p_run_at, now_us) END);
    -- The insert may have had to wait, and others went on meanwhile.
    IF p_since <= now_us AND p_since / 600000000 = (now_us + 1000000) / 600000000
       AND clock_timestamp() - statement_timestamp() < interval '1 second' THEN
        slots := now_us / 600000000 % 8 * 10 + now_us / 86400000000 % 10;
        !look
    ELSE
        PERFORM WHERE @{ns}_known_now(p_id, now_us);
    END IF;
    IF FOUND THEN
        RAISE 'holdfast: the id of a new job is there' USING ERRCODE = 'HF003';
    END IF;
    IF p_tell IS NOT NULL THEN
        PERFORM pg_notify('{ns}', p_tell);
    END IF;
    RETURN now_us;
END $body$
$create$, '!look', looks[1]), '@', schema || '.');
END $do$;

-- Whether the id is anywhere but among the waiting. With the settings that {ns}_known goes by.
CREATE FUNCTION {ns}_known_now(p_id uuid, now_us bigint) RETURNS bool LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    RETURN {ns}_known(ARRAY[p_id], p_id, p_id, now_us) IS NOT NULL;
END $$;
