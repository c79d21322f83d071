"""One small class for each insight: what it is fed, when it opens and clears, what it says (docs/insights.md)."""
