"""The papers' models: as analytic graphs to plan on, and as plain modules that train."""
