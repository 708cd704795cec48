//! The rollout side: lengths of earlier responses, workers, migrations.
