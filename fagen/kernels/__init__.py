"""All that knows a template: its configs, its rules, its launches."""
