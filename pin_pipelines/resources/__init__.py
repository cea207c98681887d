"""What the contexts share: connections and feature flags."""
