"""Programs that use Routebook as a trainer would."""
