-- For designs with a history of its own: whether an id of this range belongs to a job that has ended in the last two
-- minutes, or to a dead letter. Each slot has a statement of its own, and so a plan that touches nothing else.

DO $$
BEGIN
    EXECUTE 'CREATE FUNCTION {ns}_among_ended_of(p_slot int, p_first uuid, p_last uuid) RETURNS bool LANGUAGE plpgsql AS $f$ '
        || 'BEGIN CASE p_slot ' || (
            SELECT string_agg(format(
                'WHEN %s THEN RETURN EXISTS (SELECT FROM {ns}_history_%s h WHERE h.id BETWEEN p_first AND p_last);', n, n), ' ')
            FROM generate_series(0, 17) n)
        || ' END CASE; END $f$';
END $$;

CREATE FUNCTION {ns}_among_ended(p_first uuid, p_last uuid, now_us bigint) RETURNS bool LANGUAGE plpgsql
AS $$
DECLARE
    before_us bigint := now_us - 120000000;
BEGIN
    RETURN EXISTS (SELECT FROM {ns}_kept k WHERE k.id BETWEEN p_first AND p_last)
        OR {ns}_among_ended_of({ns}_slot(60000000, now_us), p_first, p_last)
        OR {ns}_among_ended_of({ns}_slot(86400000000, now_us), p_first, p_last)
        OR ({ns}_slot(60000000, before_us) <> {ns}_slot(60000000, now_us)
            AND ({ns}_among_ended_of({ns}_slot(60000000, before_us), p_first, p_last)
                 OR {ns}_among_ended_of({ns}_slot(86400000000, before_us), p_first, p_last)));
END $$;
