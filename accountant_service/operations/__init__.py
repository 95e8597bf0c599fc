"""Settings, logs, metrics, traces, rates and templates of a service that runs."""
